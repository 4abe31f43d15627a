"""Counters of each tenant, and of refused callers."""

from __future__ import annotations

import re

from quire.cluster.auth.key_ring import OTHER
from quire.protos.errors import PermissionDenied, Unauthenticated
from quire.protos.metric_families import COUNTER, Family, MetricSet, Value

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
