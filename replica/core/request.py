"""The engine's request: its tokens, its phase, and the deltas that report its progress."""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.protos.adapter_ref import cache_namespace
from quire.protos.errors import ContextLengthExceeded, InvalidRequest, QuireError
from quire.protos.field_checks import INT32_MAX, Range, invalid
from quire.protos.sampling_params import PRIORITY, SamplingParams
from quire.protos.wire import Facts, TokenDelta
from quire.replica.config import EngineConfig
from quire.replica.core.adapter import Adapter
from quire.replica.core.sampling_checks import check_params
from quire.replica.kv_cache.prefix_entries import ContentChain, Entry

if TYPE_CHECKING:
    from quire.replica.grammar.state import GrammarState

_COUNT = Range(0, INT32_MAX, is_integer=True)


class Phase(enum.Enum):
    """The phase of a request, as a client may observe it."""

    PENDING = "pending"  # queued, without row and blocks
    PREFILLING = "prefilling"  # has a row; some of its known tokens are not in the cache yet
    DECODING = "decoding"  # has a row; gets one new token per step
    OFFLOADED = "offloaded"  # its blocks are in the host tier
    FINISHED = "finished"


ALLOWED_TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    # A preempted request that must compute its tokens again goes back to PENDING. The prefill then includes its output.
    Phase.PENDING: frozenset({Phase.PREFILLING, Phase.FINISHED}),
    Phase.PREFILLING: frozenset({Phase.DECODING, Phase.PENDING, Phase.OFFLOADED, Phase.FINISHED}),
    Phase.DECODING: frozenset({Phase.PENDING, Phase.OFFLOADED, Phase.FINISHED}),
    Phase.OFFLOADED: frozenset({Phase.PREFILLING, Phase.DECODING, Phase.PENDING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class FinishReason(enum.StrEnum):
    """The reason why a request ended. The values are used on the wire."""

    STOP = "stop"  # EOS or one of its stop_token_ids
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # aborted by its owner, by its deadline, or at the engine's end
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class OffloadedBlock:
    """One block of an offloaded request (preempted, with its KV in host memory)."""

    index: int  # index in the request's block table of this group
    group: int
    host_block: int


@dataclass(frozen=True, slots=True)
class OffloadedBlocks:
    """The blocks of an offloaded request, and the number of its tokens that are computed."""

    num_computed: int
    blocks: list[OffloadedBlock]  # in the order of the sequence


class Request:
    """One request, from its submission to its end. The scheduler owns it after `add`.

    Parameters
    ----------
    key
        The owner's name for the request; unique among the live requests.
    prompt_ids
        [tokens] integers: the prompt, and the output of an earlier attempt on another replica. The last `num_emitted`
        tokens are this output.
    params
        The parameters of sampling, and the conditions to stop.
    num_emitted
        Number of output tokens that the client already has. They count towards max_tokens and min_tokens, and the
        first new token has this output index.
    tenant
        Name of the tenant; tenants never share blocks.
    payer
        Who pays for its cached blocks (`kv_cache/block_eviction.py`); one for all tenants of a key's owner.
    source, stream_id
        Number of the router's attachment that receives the tokens, and number of its stream. The deltas of a step
        contain them as columns, so that no Python code runs per row.
    arrival_s, deadline_s
        Times in seconds, on the clock of `Scheduler.plan`'s `now_s`. Without an arrival time the queue time is
        reported as 0.
    priority
        Requests with a smaller number start earlier under the `priority` scheduler.
    credit_tokens
        Number of new tokens after which the request pauses until `Scheduler.grant` allows more. None: no limit.
    alone
        Whether its first `ISOLATED_TOKENS` new tokens are generated in steps without other requests.
    num_expected_cached
        The router's estimate of how many of its tokens will be cached when it starts.
    retain_s
        Seconds for which its full blocks are evicted after all others, once it has ended (`kv_cache/retention.py`).
    fork_of
        Key of a live request with the same prompt and tenant, which computes the prompt for both (`forks.py`). If that
        request has ended, this is an ordinary request.
    adapter
        Its low-rank adapter; None: the model alone. Requests share blocks only if they have the same adapter.
    prediction_ids
        [tokens] int32: the client's guess of the output, a source of drafts (`replica/speculation`).
    """

    def __init__(
        self,
        key: Hashable,
        prompt_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        num_emitted: int = 0,
        tenant: str = "",
        source: int = 0,
        stream_id: int = 0,
        arrival_s: float | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        fork_of: Hashable | None = None,
        credit_tokens: int | None = None,
        alone: bool = False,
        num_expected_cached: int = 0,
        payer: str = "",
        retain_s: float = 0.0,
        adapter: Adapter | None = None,
        prediction_ids: np.ndarray | None = None,
    ):
        self.key = key
        self.params = params
        self.num_emitted = num_emitted
        self.tenant = tenant
        self.source = source
        self.stream_id = stream_id
        self.arrival_s = arrival_s
        self.deadline_s = deadline_s
        self.priority = priority
        self.fork_of = fork_of
        self.alone = alone
        self.num_expected_cached = num_expected_cached
        self.retain_s = retain_s
        self.adapter = adapter
        self.prediction_ids = prediction_ids
        # Number of output tokens that the credit allows now, those of earlier attempts included; None: no limit.
        self.credit_end = None if credit_tokens is None else num_emitted + credit_tokens
        self.parent: Request | None = None  # the request of `fork_of`, until this one starts
        self.phase = Phase.PENDING
        self.row = -1  # row of the request table while PREFILLING or DECODING
        self.arrival_index = -1  # position in the order of submission
        self.stop_ids: frozenset[int] = frozenset()  # EOS included unless ignored
        # Hashes of its full blocks.
        namespace = tenant if adapter is None else cache_namespace(tenant, adapter.ref)
        self.chain = ContentChain(namespace, payer)
        # Number of leading prompt positions with a hidden state that has been read, for the log-probability of the next
        # token or for pooling, or that is not needed.
        self.num_read = 0
        # Sum of the hidden states read for pooling, [hidden size] float64; 0: none.
        self._pooled: np.ndarray | float = 0.0
        self.num_indexed = 0  # number of leading blocks in the prefix cache, while it has a row
        self.tip: Entry | None = None  # entry of the last of these blocks
        # Number of leading tokens whose blocks were cached when it started; more than its hit if states lacked.
        self.num_known = 0
        # Entry of the newest block with a snapshot that moves on with the request (`state_snapshots.py`).
        self.moving_snapshot: Entry | None = None
        self.num_cached_tokens = 0  # prompt tokens found in the cache at first admission
        # The part of `num_cached_tokens` restored from the host tier, and the part of that pulled from another node.
        self.num_host_cached_tokens = 0
        self.num_peer_cached_tokens = 0
        # Tokens that were pulled from another node for this request, before the engine got it.
        self.num_pulled_tokens = 0
        # Drafted tokens that steps have verified, and the accepted ones among these.
        self.num_drafted = 0
        self.num_accepted = 0
        # Number of its leading tokens that are among the recent answers (`speculation/texts.py`).
        self.num_remembered = 0
        self.offloaded: OffloadedBlocks | None = None  # its blocks, while OFFLOADED
        self.is_preempted = False  # was preempted and waits to return
        self.is_paused = False
        self.grammar: GrammarState | None = None  # compiled before the scheduler sees the request
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        try:
            self._tokens = np.asarray(prompt_ids)  # checked by `validate`; `accept` makes a copy
        except ValueError as error:  # lists of different lengths
            raise InvalidRequest("prompt must be a flat list", field="prompt") from error
        self.num_tokens = self._tokens.size
        self._newest: list[bytes] = []  # int32, not yet in the array
        # The client's prompt, without the output of an earlier attempt.
        self.num_prompt_tokens = self.num_tokens - num_emitted

    @property
    def is_moved_here(self) -> bool:
        """Whether another replica has begun the stream, and it has not started here yet."""
        return self.num_emitted > 0 and self.first_scheduled_s is None

    @property
    def num_missing_tokens(self) -> int:
        """Estimated number of tokens to compute when it starts; at least 1, because its last token is never cached."""
        return max(1, self.num_tokens - self.num_expected_cached)

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt and output so far, [num_tokens]; a view.

        The newest tokens of a running request, less than a block, are in the request table until `RowTable.flush`.
        """
        if self._newest:
            self._join()
        return self._tokens[: self.num_tokens]

    @property
    def num_to_read(self) -> int:
        """Number of leading prompt positions after which no hidden state is read, but for the last position's."""
        if self.params.pooling == "mean":
            return self.num_prompt_tokens
        return 0 if self.params.prompt_logprobs is None else self.num_prompt_tokens - 1

    @property
    def reusable_ids(self) -> np.ndarray:
        """The leading tokens that may come from the cache, and one more.

        Positions with a hidden state that is not yet read must be computed.
        """
        if self.num_read < self.num_to_read:
            return self.token_ids[: self.num_read + 1]
        return self.token_ids

    @property
    def max_length(self) -> int:
        """Number of prompt and output tokens at which the request ends."""
        return self.num_prompt_tokens + self.params.max_tokens

    @property
    def run_length(self) -> int:
        """Number of prompt and output tokens at which the request ends or, without credit, pauses."""
        if self.credit_end is None:
            return self.max_length
        return min(self.max_length, self.num_prompt_tokens + self.credit_end)

    def accept(self, eos_token_ids: Sequence[int]) -> None:
        """Take over a request that has passed `validate`.

        Copies the tokens, because the caller's array may be read-only or change.
        """
        tokens = np.empty(self.num_tokens + min(self.params.max_tokens, 64), dtype=np.int32)
        tokens[: self.num_tokens] = self._tokens
        self._tokens = tokens
        eos = () if self.params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset(self.params.stop_token_ids).union(eos)
        self.num_read = self.params.prompt_logprobs_start - 1

    def append(self, token_bytes: bytes) -> None:
        """Append generated tokens, int32. The first read copies them into the array; few requests need it."""
        self._newest.append(token_bytes)
        self.num_tokens += len(token_bytes) // 4

    def _join(self) -> None:
        """Copy the newest tokens into the array. A full array is replaced by one of twice its size."""
        newest = np.frombuffer(b"".join(self._newest), np.int32)
        self._newest.clear()
        begin, end = self.num_tokens - len(newest), self.num_tokens
        if end > len(self._tokens):
            grown = np.empty(min(max(2 * len(self._tokens), end), self.max_length), dtype=np.int32)
            grown[:begin] = self._tokens[:begin]
            self._tokens = grown
        self._tokens[begin:end] = newest

    def add_pooled(self, hidden_sum: np.ndarray, num_read: int) -> None:
        """Add a sum of hidden states, [hidden size] float64; those of the first `num_read` positions are read now."""
        self._pooled = self._pooled + hidden_sum
        self.num_read = num_read

    def embedding(self) -> np.ndarray:
        """The prompt's embedding, [hidden size] float32, once all hidden states are read."""
        count = self.num_prompt_tokens if self.params.pooling == "mean" else 1
        return np.asarray(self._pooled / count, np.float32)

    def enter(self, phase: Phase) -> None:
        """Change phase.

        Raises
        ------
        ValueError
            `ALLOWED_TRANSITIONS` has no such transition.
        """
        if phase not in ALLOWED_TRANSITIONS[self.phase]:
            raise ValueError(f"request {self.key!r} cannot go from {self.phase} to {phase}")
        self.phase = phase

    def refusal(self, error: QuireError) -> TokenDelta:
        """The only delta of a request that was refused."""
        return self.delta(self.num_emitted, [], FinishReason.ERROR, error)

    def stuck_error(self, index: int) -> InvalidRequest:
        """The error for a request without any allowed token at output index `index`."""
        if self.grammar is not None and self.grammar.error:
            field = self.params.grammar.field if self.params.grammar else "grammar"
            return InvalidRequest(
                f"{field}: failed at output index {index}: {self.grammar.error}", field=field
            )
        fields = ["allowed_token_ids", "bad_words", "min_tokens"]
        if self.params.grammar is not None:
            fields.append(self.params.grammar.field)
        return InvalidRequest(
            f"{', '.join(fields)} together leave no token to choose from at output index {index}",
            field="allowed_token_ids",
        )

    def delta(
        self,
        index: int,
        token_ids: list[int],
        finish_reason: FinishReason | None = None,
        error: QuireError | None = None,
    ) -> TokenDelta:
        """A delta with the facts that the first and the last delta of a request report: counts and times."""
        facts = Facts(
            finish_reason=None if finish_reason is None else finish_reason.value,
            num_cached_tokens=self.num_cached_tokens,
            queue_s=_elapsed_s(self.arrival_s, self.first_scheduled_s),
            num_host_cached_tokens=self.num_host_cached_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=index + len(token_ids),
            prefill_s=_elapsed_s(self.first_scheduled_s, self.first_token_s),
            error=error,
            num_drafted=self.num_drafted or None,
            num_accepted=self.num_accepted if self.num_drafted else None,
            num_peer_cached_tokens=self.num_peer_cached_tokens or None,
        )
        return TokenDelta(self.key, index, token_ids, facts)


def _elapsed_s(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else max(0.0, end_s - start_s)


def validate(request: Request, config: EngineConfig) -> None:
    """Refuse a request that can never be served. This function only reads its arguments, so any thread may call it.

    Raises
    ------
    ContextLengthExceeded
        The prompt, or prompt and `max_tokens` together, exceed the model's length or the whole cache.
    InvalidRequest
        Another field is out of its bounds. The message names the field, the bound and the value.
    """
    _validate_tokens(request, config)
    _validate_labels(request, config)
    check_params(request.params, config.vocab_size, config.eos_token_ids)
    _validate_lengths(request, config)


def _validate_tokens(request: Request, config: EngineConfig) -> None:
    ids = request._tokens
    if ids.ndim != 1:
        raise InvalidRequest(
            f"prompt must be a flat list of token ids, got {ids.ndim} dimensions", field="prompt"
        )
    if len(ids) == 0:
        raise InvalidRequest("prompt must have at least 1 token, got 0", field="prompt")
    if ids.dtype.kind not in "iu":
        raise InvalidRequest(f"prompt must be integers, got {ids.dtype}", field="prompt")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        bad = low if low < 0 else high
        raise invalid("prompt", f"token ids in [0, {config.vocab_size})", bad)


def _validate_prediction(ids: np.ndarray | None, config: EngineConfig) -> None:
    if ids is None or not len(ids):
        return
    if len(ids) > config.max_model_len:
        raise InvalidRequest(
            f"prediction must have at most {config.max_model_len} tokens, got {len(ids)}",
            field="prediction",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        bad = low if low < 0 else high
        raise invalid("prediction", f"token ids in [0, {config.vocab_size})", bad)


def _validate_labels(request: Request, config: EngineConfig) -> None:
    try:
        request.tenant.encode()
    except (AttributeError, UnicodeEncodeError):
        raise invalid("cache_salt", "a string of Unicode characters", request.tenant) from None
    deadline_s = request.deadline_s
    if deadline_s is not None and (type(deadline_s) not in (int, float) or math.isnan(deadline_s)):
        raise invalid("deadline_s", "a number", deadline_s)
    PRIORITY.check("priority", request.priority)
    _validate_prediction(request.prediction_ids, config)
    _COUNT.check("num_expected_cached", request.num_expected_cached)
    if request.credit_end is not None:
        _COUNT._replace(low=1).check("credit_tokens", request.credit_end - request.num_emitted)
    if request.fork_of is not None and request.num_emitted:
        raise InvalidRequest(
            f"fork_of must be None for the rest of an earlier attempt, got {request.fork_of!r} "
            f"(num_emitted: {request.num_emitted})",
            field="fork_of",
        )


def _validate_lengths(request: Request, config: EngineConfig) -> None:
    length, emitted = request.num_tokens, request.num_emitted
    max_tokens = request.params.max_tokens
    _COUNT._replace(high=min(length, max_tokens) - 1).check("num_emitted", emitted)
    bound, where = min(
        (config.max_model_len, f"the model's context of {config.max_model_len} (max_model_len)"),
        (
            config.max_cache_tokens,
            f"the cache of {config.max_cache_tokens} (num_blocks * block_size: {config.num_blocks} * "
            f"{config.block_size}, layer groups: {len(config.groups)})",
        ),
    )
    if request.params.pooling:
        if length > bound:
            raise ContextLengthExceeded(
                f"prompt: {length} tokens do not fit {where}; the bound is {bound}", field="prompt"
            )
        return
    if length > bound - 1:
        raise ContextLengthExceeded(
            f"prompt: {length} tokens and 1 of output do not fit {where}; the bound is {bound - 1}",
            field="prompt",
        )
    num_prompt_tokens = request.num_prompt_tokens
    if num_prompt_tokens + max_tokens > bound:
        raise ContextLengthExceeded(
            f"max_tokens: {max_tokens} and a prompt of {num_prompt_tokens} tokens do not fit {where}; "
            f"the bound is {bound - num_prompt_tokens}",
            field="max_tokens",
        )
