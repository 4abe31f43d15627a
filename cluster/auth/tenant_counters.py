"""Counters of each tenant, and of refused callers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quire.cluster.auth.key_ring import OTHER, LoadedKey
from quire.protos.errors import PermissionDenied, Unauthenticated
from quire.protos.metric_families import COUNTER, GAUGE, Family, MetricSet, Value

_TENANT = ("tenant",)
# A sample with the label.
_OF_TENANT = re.compile(rb'[{,]tenant=("[^"]*")')
TENANT_FAMILIES = (
    Family(
        "quire_calls_denied_total",
        COUNTER,
        "Calls without a valid key or without the right, by error code.",
        ("code",),
        values=(Unauthenticated.code, PermissionDenied.code),
    ),
    Family(
        "quire_tenant_requests_total",
        COUNTER,
        "Requests of a tenant that had a first token and have ended.",
        _TENANT,
    ),
    Family(
        "quire_tenant_rate_limited_total",
        COUNTER,
        "Requests of a tenant that a quota refused.",
        _TENANT,
    ),
    Family(
        "quire_tenant_running_requests",
        GAUGE,
        "Requests of a tenant that have begun and not ended.",
        _TENANT,
    ),
    Family(
        "quire_tenant_quota_tokens",
        GAUGE,
        "Tokens per minute that the quotas of a tenant's keys allow at this router.",
        _TENANT,
    ),
    Family(
        "quire_tenant_quota_remaining_tokens",
        GAUGE,
        "Tokens of these quotas that are left at this router now.",
        _TENANT,
    ),
    Family(
        "quire_tenant_prompt_tokens_total",
        COUNTER,
        "Prompt tokens of a tenant's requests, cached ones included.",
        _TENANT,
    ),
    Family(
        "quire_tenant_cached_tokens_total",
        COUNTER,
        "Prompt tokens of a tenant's requests that were in a cache.",
        _TENANT,
    ),
    Family(
        "quire_tenant_output_tokens_total",
        COUNTER,
        "Tokens that were generated for a tenant.",
        _TENANT,
    ),
)
_PER_REQUEST = (
    "quire_tenant_requests_total",
    "quire_tenant_prompt_tokens_total",
    "quire_tenant_cached_tokens_total",
    "quire_tenant_output_tokens_total",
)
# Gauges that `read_keys` sets.
_OF_KEYS = (
    "quire_tenant_running_requests",
    "quire_tenant_quota_tokens",
    "quire_tenant_quota_remaining_tokens",
)


def visible_to(tenant: str, text: bytes) -> bytes:
    """Return the text of `/metrics` without the series of other tenants.

    Parameters
    ----------
    tenant
        The label of the caller's tenant, from `LoadedKey.label`. Tenants that share a label see none of its series.
    """
    own = b"" if tenant == OTHER else b'"%b"' % tenant.encode()
    lines = text.split(b"\n")
    return b"\n".join(
        line for line in lines if (found := _OF_TENANT.search(line)) is None or found[1] == own
    )


class TenantCounters:
    """The values of `TENANT_FAMILIES` in one router. `tenant` is a label: `KeyRing` bounds how many there are."""

    def __init__(self) -> None:
        self.metrics = MetricSet(TENANT_FAMILIES)
        # The values of `_PER_REQUEST` by tenant.
        self._of_tenant: dict[str, list[Value]] = {}

    def on_denied(self, code: str) -> None:
        """Count a call without the key or the right that it needs."""
        self.metrics.value("quire_calls_denied_total", code).value += 1

    def on_rate_limited(self, tenant: str) -> None:
        """Count a request that a quota refused."""
        self.metrics.value("quire_tenant_rate_limited_total", tenant).value += 1

    def read_keys(self, keys: Iterable[LoadedKey], now_s: float, num_routers: int) -> None:
        """Set the gauges to the present state of all keys: the sums over the keys of each label.

        Counters of a tenant that has sent nothing yet begin at 0 here: Prometheus counts from the first value.
        """
        for name in _OF_KEYS:
            for found in self.metrics.series(name).values():
                assert isinstance(found, Value)
                found.value = 0
        running, allowed, left = _OF_KEYS
        value = self.metrics.value
        for key in keys:
            for name in (*_PER_REQUEST, "quire_tenant_rate_limited_total"):
                value(name, key.label)
            value(running, key.label).value += key.meter.num_running
            tokens = key.meter.tokens(now_s, num_routers)
            if tokens is not None:
                value(allowed, key.label).value += tokens.limit / num_routers
                value(left, key.label).value += tokens.remaining / num_routers

    def on_end(self, tenant: str, num_prompt: int, num_cached: int, num_output: int) -> None:
        """Count a request and its tokens."""
        values = self._of_tenant.get(tenant)
        if values is None:
            values = [self.metrics.value(name, tenant) for name in _PER_REQUEST]
            self._of_tenant[tenant] = values
        requests, prompt, cached, output = values
        requests.value += 1
        prompt.value += num_prompt
        cached.value += num_cached
        output.value += num_output
