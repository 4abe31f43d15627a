"""The router's service as one caller may use it: its models, its tenant, its quotas, its own requests.

front end ──▶ KeyedService(key) ──▶ RouterService
                │ model allowed?         │ begin, end of each answer
                └──────▶ RequestBill ◀───┘
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import operator
from collections.abc import AsyncGenerator, Sequence

from quire.cluster.auth.access_rules import Right
from quire.cluster.auth.key_ring import LoadedKey
from quire.cluster.auth.quota_meter import duration
from quire.cluster.auth.request_bill import Ledger, RequestBill
from quire.cluster.auth.tenant_counters import visible_to
from quire.protos.errors import PermissionDenied, QuireError, RateLimited, shown
from quire.router.question_types import Question
from quire.router.request.params import check_label
from quire.router.status_types import (
    AdapterEntry,
    Decisions,
    LiveState,
    ModelInfo,
    Readiness,
    ReplicaStatus,
)
from quire.router.types import (
    Embeddings,
    EncodedPrompt,
    GenerationRequest,
    GenerationStream,
    ReplyScores,
    Service,
)

RATE_HEADERS = (
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
)
# Of a request: its fields, all their values at once, and the functions that set them in a copy.
_FIELDS = tuple(field.name for field in dataclasses.fields(GenerationRequest))
_values = operator.attrgetter(*_FIELDS)
_setters = [getattr(GenerationRequest, name).__set__ for name in _FIELDS]


class KeyedService:
    """Implements `Service` for one call.

    Parameters
    ----------
    key
        The caller's key; None on routes that are open.
    """

    def __init__(self, service: Service, key: LoadedKey | None, ledger: Ledger):
        self._service = service
        self._key = key
        self._ledger = ledger

    @property
    def has_observe(self) -> bool:
        """Whether the caller has the right to see the state of the application."""
        return self._key is not None and Right.OBSERVE in self._key.rights

    @property
    def shown_payer(self) -> str | None:
        """The tenant whose requests the caller may see; None: `admin` sees those of all tenants."""
        key = self._own_key()
        return None if Right.ADMIN in key.rights else key.entry.tenant

    @property
    def key_name(self) -> str:
        """The key's name in the key file, which is no secret."""
        return f"the key {self._own_key().entry.name!r}"

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """See `Service`.

        Raises
        ------
        PermissionDenied
            The key does not allow the model.
        RateLimited
            A quota of the key is used up.
        """
        key = self._allowed_key(request)
        bill = self._bill(key, request)
        try:
            return await self._service.generate(_with(request, key, bill))
        except BaseException:
            bill.close()
            raise

    async def score(self, request: GenerationRequest, questions: Sequence[Question]) -> ReplyScores:
        """See `Service`; raises as `generate` does."""
        key = self._allowed_key(request)
        bill = self._bill(key, request)
        try:
            return await self._service.score(_with(request, key, bill), questions)
        except BaseException:
            bill.close()
            raise

    async def embed(self, request: GenerationRequest, dimensions: int | None) -> Embeddings:
        """See `Service`; raises as `generate` does."""
        key = self._allowed_key(request)
        bill = self._bill(key, request)
        try:
            return await self._service.embed(_with(request, key, bill), dimensions)
        except BaseException:
            bill.close()
            raise

    async def encode(self, request: GenerationRequest) -> EncodedPrompt:
        """See `Service`; raises `PermissionDenied` if the key does not allow the model."""
        return await self._service.encode(_with(request, self._allowed_key(request), None))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Service`."""
        return await self._service.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """See `Service`."""
        return await self._service.tokens(token_ids)

    async def decisions(
        self, request_id: str | None, limit: int, payer: str | None = None
    ) -> Decisions:
        """See `Service`. A tenant sees its own requests, `admin` all."""
        payer = payer if self.shown_payer is None else self.shown_payer
        return await self._service.decisions(request_id, limit, payer)

    def adapters(self) -> list[AdapterEntry]:
        """See `Service`."""
        return self._service.adapters()

    async def load_adapter(self, name: str, path: str) -> AdapterEntry:
        """See `Service`."""
        return await self._service.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        """See `Service`."""
        await self._service.unload_adapter(name)

    def model_info(self) -> ModelInfo:
        """See `Service`."""
        return self._service.model_info()

    def readiness(self) -> Readiness:
        """See `Service`."""
        return self._service.readiness()

    def replicas(self) -> list[ReplicaStatus]:
        """See `Service`."""
        return self._service.replicas()

    def refused(self, error: QuireError) -> None:
        """See `Service`."""
        self._service.refused(error)

    async def metrics(self) -> bytes:
        """See `Service`. A tenant sees no other tenant's series, `admin` all."""
        key, text = self._own_key(), await self._service.metrics()
        return text if Right.ADMIN in key.rights else visible_to(key.label, text)

    async def live_state(self, payer: str | None = None) -> LiveState:
        """See `Service`. A tenant sees its own requests, `admin` all."""
        payer = payer if self.shown_payer is None else self.shown_payer
        return await self._service.live_state(payer)

    def watch_cache(self, period_s: float) -> AsyncGenerator[list[ReplicaStatus], None]:
        """See `Service`."""
        return self._service.watch_cache(period_s)

    def _own_key(self) -> LoadedKey:
        if self._key is None:
            raise PermissionDenied("this call needs a key")
        return self._key

    def _bill(self, key: LoadedKey, request: GenerationRequest) -> RequestBill:
        """Open the bill of a request; raises `RateLimited` if too many requests of the key run."""
        try:
            return RequestBill(
                key,
                self._ledger,
                request.request_id,
                request.model or self._service.model_info().name,
                counts_output=request.max_tokens != 0,
            )
        except RateLimited as error:
            self._ledger.counters.on_rate_limited(key.label)
            self._service.refused(error)
            raise

    def _allowed_key(self, request: GenerationRequest) -> LoadedKey:
        """Return the key, if it allows the request's model."""
        key = self._own_key()
        if key.models:
            model = request.model or self._service.model_info().name
            if model not in key.models:
                raise PermissionDenied(
                    f"the key does not allow the model {shown(model)}", field="model"
                )
        return key


def may_observe(service: Service) -> bool:
    """Whether the caller of a service may see the state of the application. Without keys every caller may."""
    return not isinstance(service, KeyedService) or service.has_observe


def shown_payer(service: Service) -> str | None:
    """Return the tenant whose requests the caller of a service may see; None: those of all tenants."""
    return service.shown_payer if isinstance(service, KeyedService) else None


def key_name(service: Service) -> str:
    """Return a name for the caller of a service in logs."""
    return service.key_name if isinstance(service, KeyedService) else "a viewer"


def _with(
    request: GenerationRequest, key: LoadedKey, bill: RequestBill | None
) -> GenerationRequest:
    """Return the request in its tenant's scope: the tenant's name, and a digest of the client's salt.

    A digest, so that the scope is short, and no salt equals another tenant's scope. The copy takes a third of the time
    of `dataclasses.replace`, which would be half of the whole cost of a key.
    """
    scope = key.entry.tenant
    if request.tenant:
        check_label("tenant", request.tenant)
        scope += "/" + hashlib.blake2b(request.tenant.encode(), digest_size=16).hexdigest()
    copied = object.__new__(GenerationRequest)
    # Without a loop in Python: call each function with the copy and its value.
    collections.deque(
        map(operator.call, _setters, itertools.repeat(copied), _values(request)), maxlen=0
    )
    object.__setattr__(copied, "tenant", scope)
    object.__setattr__(copied, "bill", bill)
    return copied


def rate_headers(key: LoadedKey, ledger: Ledger) -> dict[str, str]:
    """Return the headers that say how many tokens are left, as OpenAI names them; empty without a quota of tokens."""
    tokens = key.meter.tokens(ledger.clock(), ledger.num_routers())
    if tokens is None:
        return {}
    values = (str(tokens.limit), str(tokens.remaining), duration(tokens.reset_s))
    return dict(zip(RATE_HEADERS, values, strict=True))
