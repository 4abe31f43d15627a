"""Messages between routers and replicas.

    router ── Submit ──▶ replica       one unary Serve call per request
    router ◀─ Completion ── replica
    router ◀─ Hello, Frame, Frame ...  one attach stream per (router, replica), one frame per engine step

Plain Python and numpy; imports neither torch nor ray. `wire_codec.py` describes the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np

from quire.protos import ragged
from quire.protos.errors import QuireError
from quire.protos.wire_codec import (
    Codec,
    Message,
    Record,
    WireError,
    array,
    list_of,
    named_tuple,
    optional,
    record,
)

MAX_LOGPROBS = 20
# Tokens that a request with `Submit.alone` generates in steps without any other request.
ISOLATED_TOKENS = 4
# Below this temperature the most likely token is taken: for logits that differ by more than float32 rounding, the
# distribution is a single token.
GREEDY_TEMPERATURE = 1e-5
# A replica ends a stream that its router has not listed for this many seconds.
LEASE_S = 10.0
_HASHES = array("<u8")
Hashes = Annotated[np.ndarray, _HASHES]
Int32Array = Annotated[np.ndarray, array("<i4")]


# ----------------------------------------------------------------------------------------------------------
# Sampling parameters
# ----------------------------------------------------------------------------------------------------------


MAX_GRAMMAR_BYTES = 64 * 1024
# Bound on a grammar that a router makes from tools; all that are served fit. A replica compiles 0.5 MB in 0.5 s and in
# less than 64 MiB.
MAX_TOOL_GRAMMAR_BYTES = 1024 * 1024
# `Grammar.field` of such a grammar.
TOOLS_FIELD = "tools"
GRAMMAR_KINDS = ("json_schema", "regex", "choice", "lark")
# How an embedding follows from the hidden states of a prompt's tokens: that of the last token, or the mean of all.
POOLINGS = ("last", "mean")


class Grammar(NamedTuple):
    """A formal language, such as a JSON schema, that the output must follow."""

    kind: str  # one of GRAMMAR_KINDS
    text: str  # a JSON schema, a regular expression, a JSON list of strings, or a Lark grammar
    field: str  # name of the client's field, for errors


_Ids = Annotated[tuple[int, ...], Codec(None, tuple)]
_TUPLES = Codec(None, lambda items: tuple(map(tuple, items)))


@dataclass(frozen=True, slots=True)
class SamplingParams(Record):
    """Parameters of sampling and of the end of the output, with every default resolved.

    The next token is a pure function of (prompt ids, these parameters, seed, choice, absolute position), so any
    replica can continue a stream. `protos/sampling_bounds.py` has the bounds.
    """

    max_tokens: int = 16  # maximum number of tokens to generate
    min_tokens: int = 0  # EOS and stop ids are masked before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # (0, 1]; 1 = off
    seed: int = 0  # unsigned 64 bits; the router chooses one if the client gave none
    choice: int = 0  # index of this sample among the n of one request; part of the noise key
    stop_token_ids: _Ids = ()  # ids that end the request as EOS does
    ignore_eos: bool = False
    min_p: float = 0.0  # [0, 1]; excludes tokens less likely than min_p times the most likely one
    # For tokens in the prompt or the output: positive logits are divided by it, others multiplied. 1 = off.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # the same, multiplied by the token's number of occurrences
    # Pairs of a token id and the value to add to its logit.
    logit_bias: Annotated[tuple[tuple[int, float], ...], _TUPLES] = ()
    allowed_token_ids: _Ids = ()  # the only ids to choose from; empty = all
    # Token sequences that the output never contains.
    bad_words: Annotated[tuple[tuple[int, ...], ...], _TUPLES] = ()
    # Return log-probabilities of the unmodified distribution: of each output token and of this many most likely
    # ones. None = no log-probabilities.
    logprobs: int | None = None
    grammar: Annotated[Grammar | None, optional(named_tuple(Grammar))] = None
    # Return the same for the tokens of the prompt, except the first, which has no distribution.
    prompt_logprobs: int | None = None
    # Position of the first prompt token for which they are returned. The tokens before it may come from the cache.
    prompt_logprobs_start: int = 1
    # One of POOLINGS: the request generates nothing and ends with the embedding of its prompt. Empty: it generates.
    pooling: str = ""


# ----------------------------------------------------------------------------------------------------------
# Requests: the unary call
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit(Message):
    """A request from a router to a replica.

    `prompt_ids` holds every token for which the replica needs KV. The last `num_emitted` tokens were generated by an
    earlier attempt: they count towards max_tokens and min_tokens, and the first new token has the index `num_emitted`.
    """

    router_id: str
    stream_id: int  # the router's number for this attempt; frames carry it back
    request_id: str  # a label for logs
    prompt_ids: Int32Array  # [tokens] int32
    params: Annotated[SamplingParams, record(SamplingParams)]
    num_emitted: int = 0
    tenant: str = ""  # cache key: tenants never share blocks
    deadline_s: float | None = None  # seconds from now, by the receiver's clock
    priority: int = 0  # smaller is sooner
    # `stream_id` of another choice of the same request on the same replica, so that the prompt is computed once.
    fork_of: int | None = None
    # Number of tokens after `num_emitted` that the replica may generate before it needs more credit. None: all.
    credit_tokens: int | None = None
    # The request was running during two replica crashes, so it generates its next tokens in steps without others.
    alone: bool = False
    # Number of leading tokens of `prompt_ids` that the router expects in the replica's cache.
    num_expected_cached: int = 0
    # The tenant of the caller's key, to which the cache is fair; empty without keys.
    payer: str = ""
    # Seconds for which the request's blocks are evicted after all others, once it has ended; the router can end this
    # earlier (`Replica.renew`).
    retain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion(Message):
    """The reply to the unary call: the end of the request and its statistics. Tokens are sent in frames."""

    finish_reason: str  # stop | length | abort | error
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens found in the cache at first admission
    queue_s: float = 0.0  # submit to first scheduled
    prefill_s: float = 0.0  # first scheduled to first token
    error: dict[str, Any] | None = None  # `QuireError.to_wire`
    num_host_cached_tokens: int = 0  # the part of `num_cached_tokens` restored from the host tier


# ----------------------------------------------------------------------------------------------------------
# Frames: the attach stream
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The first message of an attach stream: the replica, and facts that are constant during its life."""

    replica: str  # Serve's unique id of the replica
    epoch: str
    model_name: str  # with `revision`, the seed of the routing hash
    revision: str  # of the weights: the commit of a download, else a fingerprint
    dtype: str  # `EngineConfig.number_format`; replicas with different formats may give different tokens
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    max_cache_tokens: int  # tokens of one request that the whole KV pool holds
    block_size: int
    eos_token_ids: list[int]
    startup_s: dict[str, float]  # seconds of start-up by phase
    node: str = ""  # Ray's id of the replica's node
    flight: str = (
        ""  # path of its flight recorder on that node (`protos.flight_recorder`); empty: none
    )
    device: str = ""  # cpu | cuda
    num_threads: int = 0  # threads of matrix products on the CPU; 0 on a GPU
    cache_tokens: int = 0  # tokens that the KV pool holds in requests of `typical_len` tokens
    typical_len: int = 0
    typical_requests: int = (
        0  # number of requests of `typical_len` tokens that run at the same time
    )
    has_states: bool = False  # whether hits end at snapshots of recurrent states
    hidden_size: int = 0  # values of an embedding

    @property
    def weights(self) -> str:
        """Model, revision and number format. A stream can continue only on a replica with an equal value."""
        return "\x00".join((self.model_name, self.revision, self.dtype))


class TokenLogprob(NamedTuple):
    """Log-probability of one output token, and the most likely tokens at its position."""

    logprob: float  # natural logarithm
    top_ids: list[int]  # the most likely ids, best first; at most `SamplingParams.logprobs`
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of n consecutive prompt tokens, each given the tokens before it.

    Stored as columns instead of `TokenLogprob` objects because a prompt may have a hundred thousand tokens.
    """

    start: int  # position of the first token in the prompt, at least 1
    token_ids: np.ndarray  # [n] int32, the prompt's tokens
    logprobs: np.ndarray  # [n] float32, natural logarithms
    ranks: np.ndarray  # [n] int32, 1 for the most likely id
    top_ids: np.ndarray  # [n, k] int32, the most likely ids, best first
    top_logprobs: np.ndarray  # [n, k] float32

    def __len__(self) -> int:
        return len(self.logprobs)

    def after(self, start: int) -> PromptLogprobs:
        """Return the part that starts at this position of the prompt."""
        skip = min(max(0, start - self.start), len(self))
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return PromptLogprobs(self.start + skip, *(column[skip:] for column in columns))

    def to_wire(self) -> list[Any]:
        return [
            self.start,
            self.top_ids.shape[1],
            *(
                column.astype("<i4", copy=False).tobytes()
                for column in (self.token_ids, self.ranks)
            ),
            self.top_ids.astype("<i4", copy=False).tobytes(),
            *(x.astype("<f4", copy=False).tobytes() for x in (self.logprobs, self.top_logprobs)),
        ]

    @classmethod
    def from_wire(cls, values: list[Any]) -> PromptLogprobs:
        start, num_top, *columns = values
        ids, ranks, top_ids = (np.frombuffer(column, "<i4") for column in columns[:3])
        logprobs, top = (np.frombuffer(column, "<f4") for column in columns[3:])
        shape = (len(ids), num_top)
        if len(ranks) != len(ids) or len(logprobs) != len(ids) or len(top) != len(ids) * num_top:
            raise WireError(
                f"PromptLogprobs: {len(ids)} tokens, {len(ranks)} ranks, {len(logprobs)} "
                f"log-probabilities and {len(top)} of the likeliest {num_top}"
            )
        return cls(start, ids, logprobs, ranks, top_ids.reshape(shape), top.reshape(shape))


class Facts(NamedTuple):
    """Rare facts about a stream: its first output, its end, log-probabilities. Most frames have none.

    A frame has the fields up to `embedding`. The others stay in the replica, for `Completion`.
    """

    finish_reason: str | None = None  # stop | length | abort | error, at the end only
    num_cached_tokens: int = 0  # prompt tokens found in the cache at first admission
    queue_s: float = 0.0  # submit to first scheduled
    num_host_cached_tokens: int = 0  # the part of `num_cached_tokens` restored from the host tier
    logprobs: list[TokenLogprob] | None = None  # one per token, if the request asks for them
    # A part of the prompt's log-probabilities, if the request asks for them: in order, before the first token.
    prompt_logprobs: PromptLogprobs | None = None
    # [hidden size] float32, at the end of a request with `SamplingParams.pooling`. It has no tokens.
    embedding: np.ndarray | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # so far, those of earlier attempts included
    prefill_s: float = 0.0  # first scheduled to first token
    error: QuireError | None = None

    def to_wire(self) -> list[Any]:
        values: list[Any] = list(self[:7])
        if self.prompt_logprobs is not None:
            values[5] = self.prompt_logprobs.to_wire()
        if self.embedding is not None:
            values[6] = self.embedding.astype("<f4", copy=False).tobytes()
        while values[-1] is None:
            values.pop()
        return values

    @classmethod
    def from_wire(cls, values: list[Any]) -> Facts:
        facts = cls(*values)
        if facts.logprobs is not None:
            facts = facts._replace(logprobs=[TokenLogprob(*of_token) for of_token in values[4]])
        if facts.prompt_logprobs is not None:
            facts = facts._replace(prompt_logprobs=PromptLogprobs.from_wire(values[5]))
        if facts.embedding is not None:
            facts = facts._replace(embedding=np.frombuffer(values[6], "<f4"))
        return facts


NO_FACTS = Facts()


@dataclass(slots=True)
class TokenDelta:
    """New tokens of one stream: `token_ids[i]` has the absolute output index `index + i`.

    Treat it as frozen. The dataclass is not frozen because that would make the constructor three times slower (each
    field is set with `object.__setattr__`), and it runs once per stream and frame.
    """

    # On the wire the number of the stream, in the engine `Request.key`.
    key: Any
    index: int
    token_ids: list[int]
    facts: Facts = NO_FACTS

    @property
    def finish_reason(self) -> str | None:
        return self.facts.finish_reason


@dataclass(slots=True)
class TokenRecord(Record):
    """New tokens of n streams, as ragged columns: no Python object per stream or token. Treat it as frozen.

    ```
     stream_ids   [    7    |  9  |       4        ]
     index        [   20    |  3  |       0        ]     20 is the output index of a
     token_ids    [ a   b   |  c  |  d   e   f     ]
     cu           [ 0          2     3              6 ]
    ```
    """

    stream_ids: Annotated[np.ndarray, array("<i8")]  # [n] int64
    index: Int32Array  # [n] int32, absolute output index of the stream's first token
    token_ids: Int32Array  # [N] int32
    # [n + 1] int32: stream i has the tokens [cu[i], cu[i + 1]). None: one token each.
    cu: Annotated[np.ndarray | None, optional(array("<i4"))] = None

    def __len__(self) -> int:
        return len(self.stream_ids)

    @classmethod
    def of(cls, deltas: Sequence[TokenDelta]) -> TokenRecord:
        """The tokens of these deltas, whose keys are numbers of streams."""
        counts = [len(delta.token_ids) for delta in deltas]
        return cls(
            np.array([delta.key for delta in deltas], np.int64),
            np.array([delta.index for delta in deltas], np.int32),
            np.array([i for delta in deltas for i in delta.token_ids], np.int32),
            ragged.cumulated(counts),
        )

    def __add__(self, other: TokenRecord) -> TokenRecord:
        counts = [ragged.counts(len(record), record.cu) for record in (self, other)]
        return TokenRecord(
            np.concatenate([self.stream_ids, other.stream_ids]),
            np.concatenate([self.index, other.index]),
            np.concatenate([self.token_ids, other.token_ids]),
            ragged.cumulated(np.concatenate(counts)),
        )

    def select(self, streams: np.ndarray) -> TokenRecord:
        """The part of these streams, [n] bool."""
        token_ids, cu = ragged.select(self.token_ids, self.cu, streams)
        return TokenRecord(self.stream_ids[streams], self.index[streams], token_ids, cu)

    def deltas(self, facts: Iterable[Facts] = ()) -> Iterator[TokenDelta]:
        """One delta per stream. The first ones get these facts."""
        return map(
            TokenDelta,
            self.stream_ids.tolist(),
            self.index.tolist(),
            ragged.lists(self.token_ids, self.cu),
            itertools.chain(facts, itertools.repeat(NO_FACTS)),
        )

    @classmethod
    def from_wire(cls, values: list[Any]) -> TokenRecord:
        record = super(TokenRecord, cls).from_wire(values)
        num_streams, num_tokens = len(record.stream_ids), len(record.token_ids)
        if len(record.index) != num_streams or not ragged.fits(num_streams, num_tokens, record.cu):
            cu = None if record.cu is None else record.cu.tolist()
            raise WireError(
                f"TokenRecord: {num_streams} stream ids, {len(record.index)} indices and "
                f"{num_tokens} tokens, cu: {cu}"
            )
        return record


_NO_HASHES = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class CacheEvents(Record):
    """Changes of one step to a replica's prefix cache, in routing hashes.

    A reader applies them in this order: cleared (both tiers), removed, stored. A hash is in one tier at a time; a batch
    that moves a hash to the other tier removes it from the old one and stores it in the new one.
    """

    seq: int  # number of the batch within an epoch: 1, 2, ... without gaps
    stored: Hashes  # [n] uint64, parents before children
    removed: Hashes  # [n] uint64
    cleared: bool = False
    # [n] uint64, in any order
    host_stored: Hashes = field(default_factory=lambda: _NO_HASHES)
    # [n] uint64
    host_removed: Hashes = field(default_factory=lambda: _NO_HASHES)


class Load(NamedTuple):
    """State of a replica, for the router's cost function."""

    num_running: int = 0  # requests with a row
    num_waiting: int = 0  # requests accepted and not yet scheduled
    queued_prefill_tokens: int = 0  # tokens that waiting and running requests still have to prefill
    num_decode_tokens: int = 0  # KV tokens of the decoding rows
    blocks_free: int = 0
    blocks_cached: int = 0  # evictable blocks with known content
    blocks_in_use: int = 0
    blocks_total: int = 0
    prefill_s_per_token: float = 0.0  # measured, exponential average; 0 = not yet known
    decode_step_s: float = 0.0  # measured seconds of a decode step; 0 = not yet known
    num_steps: int = 0  # steps so far; proof of progress
    num_compiles: int = 0  # kernels or graphs built since the replica was ready; stays 0
    num_preemptions: int = 0  # preemptions so far
    host_blocks_free: int = 0  # blocks of the host tier, of the device's block size
    host_blocks_cached: int = 0
    host_blocks_in_use: int = 0
    host_blocks_total: int = 0
    num_offloads: int = 0  # preempted requests with blocks copied to the host tier
    num_restores: int = 0  # offloaded requests with blocks copied back to the device
    stalled_s: float = 0.0  # seconds since the last step ended, while there is work; 0 when idle
    num_places: int | None = (
        None  # requests that the replica accepts before it refuses one; None = no bound
    )
    num_routers: int = 1  # attached routers, which share these places
    # Waiting requests that the next steps can start: the free rows, or 0 if the queue's head lacks memory.
    num_startable: int = 0
    blocks_retained: int = 0  # the part of `blocks_cached` that is evicted after the rest
    host_blocks_retained: int = 0  # the same part of `host_blocks_cached`


@dataclass(frozen=True, slots=True)
class Frame(Message):
    """The message of a replica to one router after each step, and as a heartbeat.

    `tokens` has an entry for each stream with something new, also if it has no token. `facts[i]` belongs to entry i:
    the entries with facts come first. A stream may have several entries; they are in order.

    `events_seq` is the seq of the replica's last cache event, whether or not this frame has events. `digest` covers all
    routing hashes at that point (`tier_digest`); a router asks for a snapshot if its replay has another digest.
    """

    epoch: str  # id of the engine instance
    tokens: Annotated[TokenRecord | None, optional(record(TokenRecord))] = None
    facts: Annotated[list[Facts], list_of(record(Facts))] = field(default_factory=list)
    events: Annotated[list[CacheEvents], list_of(record(CacheEvents))] = field(default_factory=list)
    events_seq: int = 0
    digest: int = 0
    load: Annotated[Load, named_tuple(Load)] = field(default_factory=Load)
    # [n] uint64: one page of the hashes in the device tier at `events_seq`
    snapshot: Annotated[np.ndarray | None, optional(_HASHES)] = None
    snapshot_more: bool = False  # another page follows
    # [m] uint64: the same page's hashes in the host tier
    host_snapshot: Hashes = field(default_factory=lambda: _NO_HASHES)

    def token_deltas(self) -> Iterator[TokenDelta]:
        """Return the new tokens of each stream with their facts."""
        return iter(()) if self.tokens is None else self.tokens.deltas(self.facts)

    @staticmethod
    def pack(
        deltas: Sequence[TokenDelta], others: TokenRecord | None = None
    ) -> tuple[TokenRecord | None, list[Facts]]:
        """The values of `tokens` and `facts` for deltas that have facts, and for other tokens."""
        if not deltas:
            return others, []
        tokens = TokenRecord.of(deltas)
        return (tokens if others is None else tokens + others), [delta.facts for delta in deltas]

    @classmethod
    def from_wire(cls, values: list[Any]) -> Frame:
        frame = super(Frame, cls).from_wire(values)
        num_streams = 0 if frame.tokens is None else len(frame.tokens)
        if len(frame.facts) > num_streams:
            raise WireError(f"Frame: {len(frame.facts)} facts of {num_streams} streams")
        return frame
