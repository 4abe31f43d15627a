"""What both ends of the bus share: sampling parameters, the routing hash and the frame codec.

Plain Python and numpy; imports neither torch nor ray. The bus is hybrid (DESIGN §1): one unary Serve call
for each request (`Submit` in, `Completion` out) and one attach stream for each (router, replica) that
carries one `Frame` per engine step.

Every message is msgpack of a flat list whose first item is `WIRE_VERSION`, followed by the CRC-32 of these bytes: a
reader refuses another version, or a message that was damaged on its way, instead of guessing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np

WIRE_VERSION = 4
MAX_LOGPROBS = 20
# Tokens that a request with `Submit.alone` generates in steps without any other request.
ISOLATED_TOKENS = 4
# Below this temperature the most likely token is taken: for logits that differ by more than float32 rounding, the
# distribution is a single token.
GREEDY_TEMPERATURE = 1e-5
LEASE_S = 10.0  # a stream that its router has not named for so long ends at the replica


class WireError(ValueError):
    """Bytes that are not a message of this version."""


# ----------------------------------------------------------------------------------------------------------
# Sampling parameters
# ----------------------------------------------------------------------------------------------------------


MAX_GRAMMAR_BYTES = 64 * 1024
GRAMMAR_KINDS = ("json_schema", "regex", "choice", "lark")


class Grammar(NamedTuple):
    """A language that the output must be in."""

    kind: str  # one of GRAMMAR_KINDS
    text: str  # a JSON schema, a regular expression, a JSON list of strings, or a Lark grammar
    field: str  # where the client gave it, for errors


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; the engine's view, complete and resolved.

    The next token is a pure function of (prompt ids, these parameters, seed, choice, absolute position), so
    a stream can be continued on any replica (DESIGN §6.2).
    """

    max_tokens: int = 16  # most tokens to generate, >= 1
    min_tokens: int = 0  # EOS and stop ids are masked before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # (0, 1]; 1 = off
    seed: int = (
        0  # unsigned 64 bits; whoever accepts the request draws one when the client gave none
    )
    choice: int = 0  # index of this sample among the n of one request; part of the noise key
    stop_token_ids: tuple[int, ...] = ()  # end the request as EOS does
    ignore_eos: bool = False
    min_p: float = 0.0  # [0, 1]; leaves out what is less likely than min_p times the likeliest
    # Of what prompt and output contain, logits above 0 are divided by it and others multiplied; 1 = off.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # taken from the logits of what the output contains
    frequency_penalty: float = 0.0  # the same, times how often it does
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # no others; empty = all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output never contains
    # Log-probabilities of the model's distribution, before anything above shapes it: of each token, and of
    # so many of the likeliest in its place, at most MAX_LOGPROBS; None = none at all.
    logprobs: int | None = None
    grammar: Grammar | None = None
    # The same of each token of the prompt, given those before it; the first has none.
    prompt_logprobs: int | None = None

    def to_wire(self) -> list[Any]:
        return [getattr(self, f.name) for f in dataclasses.fields(self)]

    @classmethod
    def from_wire(cls, values: list[Any]) -> SamplingParams:
        names = [f.name for f in dataclasses.fields(cls)]
        if len(values) != len(names):
            raise WireError(f"SamplingParams: {len(values)} values, expected {len(names)}")
        kwargs = dict(zip(names, values, strict=True))
        for name in ("stop_token_ids", "allowed_token_ids"):
            kwargs[name] = tuple(kwargs[name])
        for name in ("logit_bias", "bad_words"):
            kwargs[name] = tuple(tuple(item) for item in kwargs[name])
        if kwargs["grammar"] is not None:
            kwargs["grammar"] = Grammar(*kwargs["grammar"])
        return cls(**kwargs)


# ----------------------------------------------------------------------------------------------------------
# Routing hash
# ----------------------------------------------------------------------------------------------------------

ROUTING_BLOCK_TOKENS = 64
_U64 = np.uint64
MIN_ROUTING_WEIGHTS = 1 << 15
# As arrays of no dimension: an operation takes them as they are, where a scalar costs it a conversion.
_MIX_ADD = np.array(0x9E3779B97F4A7C15, _U64)
_MIX_ROUNDS = (
    (np.array(30, _U64), np.array(0xBF58476D1CE4E5B9, _U64)),
    (np.array(27, _U64), np.array(0x94D049BB133111EB, _U64)),
)
_MIX_LAST = np.array(31, _U64)


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64 bits that mixes all of them.

    Of arrays, not of scalars: numpy wraps the former around in silence.
    """
    x = x + _MIX_ADD
    for shift, factor in _MIX_ROUNDS:
        x ^= x >> shift
        x *= factor
    x ^= x >> _MIX_LAST
    return x


@functools.lru_cache(maxsize=8)
def _weight_table(num_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The first 2^num_bits weights, [2^num_bits / 64, 64] uint64, and their sums over each block, [2^num_bits / 64]
    uint64: one table for all hashers of a process."""
    weights = _splitmix64(np.arange(1 << num_bits, dtype=_U64)) | _U64(1)
    weights = weights.reshape(-1, ROUTING_BLOCK_TOKENS)
    sums = weights.sum(axis=1, dtype=_U64)
    weights.setflags(write=False)
    sums.setflags(write=False)
    return weights, sums


def routing_weights(num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """[blocks, 64] uint64, the weights of at least `num_tokens` positions, and [blocks] uint64, their sums."""
    return _weight_table((max(num_tokens, MIN_ROUTING_WEIGHTS) - 1).bit_length())


def routing_block_sums(starts: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """What routing blocks add to the running sums of their sequences, any number of them in one pass.

    Parameters
    ----------
    starts
        [n] integers, absolute position of each block's first token; multiples of 64.
    token_ids
        [n, 64] any integer dtype, non-negative.

    Returns
    -------
    [n] uint64.
    """
    if not len(starts):
        return np.empty(0, _U64)
    weights, sums = routing_weights(int(starts.max()) + ROUTING_BLOCK_TOKENS)
    rows = starts // ROUTING_BLOCK_TOKENS
    return _block_sums(token_ids, weights.take(rows, axis=0), sums.take(rows))


def _block_sums(token_ids: np.ndarray, weights: np.ndarray, weight_sums: np.ndarray) -> np.ndarray:
    """[n] uint64: sum of w (t + 1) over a block, as sum of w t + sum of w. Of the ways to write it in numpy the one
    that reads each operand once and writes no products: 5 us for 256 blocks, where multiply and sum take 8."""
    sums = np.einsum("ij,ij->i", token_ids.astype(_U64), weights)
    sums += weight_sums
    return sums


def routing_hashes(running_sums: np.ndarray, chain_seeds: np.ndarray) -> np.ndarray:
    """[n] uint64, the hashes of prefixes with these sums, [n] uint64, in chains with these seeds."""
    return _splitmix64(running_sums ^ chain_seeds)


class RoutingHasher:
    """64-bit hashes of every 64-token prefix of a prompt; a hint for routing, never proof of equality.

    ``h[i] = splitmix64(chain_seed ^ sum(w[t] * (token[t] + 1) for t < 64 * (i + 1)))`` modulo 2^64 with fixed
    pseudo-random odd weights w: multilinear hashing. A prefix sum makes all the hashes of a prompt one
    vectorised pass, and a running sum extends them as tokens are generated. h[i] depends on every token
    before it, so equal hashes mean equal prefixes up to a chance of 2^-64 for prompts not made to collide; a
    collision costs a detour, not a wrong answer, because the engine reuses KV by its own keyed BLAKE2b.

    The engine, which extends many sequences at once by a block each, calls `routing_block_sums` and
    `routing_hashes` itself.

    Parameters
    ----------
    model, revision, tenant
        Chains of different values are disjoint; the tenant's salt keeps tenants apart.
    """

    def __init__(self, model: str, revision: str = "", tenant: str = ""):
        key = "\x00".join((model, revision, tenant)).encode()
        digest = hashlib.blake2b(key, digest_size=8, person=b"quire-route").digest()
        self.chain_seed = _U64(int.from_bytes(digest, "little"))

    def hashes(self, token_ids: np.ndarray) -> np.ndarray:
        """Hash every whole routing block's prefix.

        Parameters
        ----------
        token_ids
            [tokens] any integer dtype, non-negative.

        Returns
        -------
        [tokens // 64] uint64, hash i covers tokens [0, 64 * (i + 1)).
        """
        return self.extend(_U64(0), 0, token_ids)[0]

    def extend(
        self, running_sum: np.uint64, start: int, token_ids: np.ndarray
    ) -> tuple[np.ndarray, np.uint64]:
        """Hashes of the routing blocks that `token_ids` completes, and the new running sum.

        Parameters
        ----------
        running_sum
            Sum over the tokens before `start` (0 when start is 0).
        start
            Absolute position of token_ids[0]; a multiple of 64.
        token_ids
            [tokens] any integer dtype; a tail shorter than a block is ignored.
        """
        if start % ROUTING_BLOCK_TOKENS:
            raise ValueError(f"start must be a multiple of {ROUTING_BLOCK_TOKENS}, got {start}")
        blocks = len(token_ids) // ROUTING_BLOCK_TOKENS
        if blocks == 0:
            return np.empty(0, _U64), running_sum
        tokens = blocks * ROUTING_BLOCK_TOKENS
        ids = np.asarray(token_ids[:tokens]).reshape(blocks, ROUTING_BLOCK_TOKENS)
        weights, weight_sums = routing_weights(start + tokens)
        first = start // ROUTING_BLOCK_TOKENS
        sums = _block_sums(
            ids, weights[first : first + blocks], weight_sums[first : first + blocks]
        )
        sums[:1] += running_sum
        np.add.accumulate(sums, out=sums)
        return routing_hashes(sums, self.chain_seed), sums[-1]


# ----------------------------------------------------------------------------------------------------------
# Requests: the unary call
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A request on its way to a replica.

    `prompt_ids` are all tokens whose KV the replica must have, `num_emitted` of them (the tail) were already
    generated by an earlier attempt: they count towards max_tokens and min_tokens, and the first new token
    has the index `num_emitted`.
    """

    router_id: str
    stream_id: int  # the router's number for this attempt; frames carry it back
    request_id: str  # a label for logs
    prompt_ids: np.ndarray  # [tokens] int32
    params: SamplingParams
    num_emitted: int = 0
    tenant: str = ""  # cache key: tenants never share blocks
    deadline_s: float | None = None  # seconds from now, by the receiver's clock
    priority: int = 0  # smaller is sooner
    # `stream_id` of another choice of the same request, sent to the same replica: its prompt is computed once.
    fork_of: int | None = None
    # So many tokens beyond `num_emitted` it may generate before it is granted more; None: all.
    credit_tokens: int | None = None
    # It was in the step in which more than one replica crashed: its next tokens come in steps of its own.
    alone: bool = False
    # Of `prompt_ids`, those that the router expects in the replica's cache when the request's turn comes.
    num_expected_cached: int = 0

    def encode(self) -> bytes:
        return _seal(
            [
                self.router_id,
                self.stream_id,
                self.request_id,
                np.ascontiguousarray(self.prompt_ids, dtype="<i4").tobytes(),
                self.params.to_wire(),
                self.num_emitted,
                self.tenant,
                self.deadline_s,
                self.priority,
                self.fork_of,
                self.credit_tokens,
                self.alone,
                self.num_expected_cached,
            ]
        )

    @classmethod
    def decode(cls, data: bytes) -> Submit:
        router_id, stream_id, request_id, ids, params, *others = _open(data, 13, "Submit")
        return cls(
            router_id,
            stream_id,
            request_id,
            np.frombuffer(ids, dtype="<i4"),
            SamplingParams.from_wire(params),
            *others,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer of the unary call: how the request ended and what it cost. Tokens travel in frames."""

    finish_reason: str  # stop | length | abort | error
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was found in the cache at first admission
    queue_s: float = 0.0  # submit to first scheduled
    prefill_s: float = 0.0  # first scheduled to first token
    error: dict[str, Any] | None = None  # `QuireError.to_wire`
    num_host_cached_tokens: int = 0  # of `num_cached_tokens`, those copied back from the host tier

    def encode(self) -> bytes:
        return _seal([getattr(self, f.name) for f in dataclasses.fields(self)])

    @classmethod
    def decode(cls, data: bytes) -> Completion:
        return cls(*_open(data, len(dataclasses.fields(cls)), "Completion"))


# ----------------------------------------------------------------------------------------------------------
# Frames: the attach stream
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of an attach stream: who answers, and the facts that never change in its life."""

    replica: str  # Serve's unique id of the replica
    epoch: str
    model_name: str  # with `revision`, the seed of the routing hash
    revision: str  # of the weights: the commit of a download, else a fingerprint
    dtype: str  # `EngineConfig.number_format`: tokens of replicas that differ in it may differ
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    max_cache_tokens: int  # tokens that the whole KV pool holds
    block_size: int
    eos_token_ids: list[int]
    startup_s: dict[str, float]  # seconds of start-up by phase
    node: str = ""  # Ray's id of the node that it runs on
    flight: str = ""  # path there of what it leaves behind when it dies (`protos.flight_recorder`); empty: nothing
    device: str = ""  # cpu | cuda
    num_threads: int = 0  # of matrix products on the CPU; 0 on a GPU
    cache_tokens: int = 0  # that the KV pool holds in requests of `typical_len` tokens
    typical_len: int = 0
    typical_requests: int = 0  # of `typical_len` tokens that run at a time

    @property
    def weights(self) -> str:
        """Equal for replicas that give the same tokens: a stream can continue from one to the other."""
        return "\x00".join((self.model_name, self.revision, self.dtype))

    def encode(self) -> bytes:
        return _seal([getattr(self, f.name) for f in dataclasses.fields(self)])

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        return cls(*_open(data, len(dataclasses.fields(cls)), "Hello"))


class TokenLogprob(NamedTuple):
    """What the model thought of one output token, and what it would rather have said."""

    logprob: float  # natural logarithm, of the token itself
    top_ids: list[int]  # the likeliest, best first; as many as `SamplingParams.logprobs`
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """What the model thought of n tokens of a prompt, given those before them.

    Columns, not a `TokenLogprob` each: a prompt may have a hundred thousand tokens.
    """

    start: int  # position in the prompt of the first of them, at least 1
    token_ids: np.ndarray  # [n] int32, the prompt's own
    logprobs: np.ndarray  # [n] float32, natural logarithms
    ranks: np.ndarray  # [n] int32, 1 for the likeliest id of all
    top_ids: np.ndarray  # [n, k] int32, the likeliest, best first
    top_logprobs: np.ndarray  # [n, k] float32

    def __len__(self) -> int:
        return len(self.logprobs)

    def after(self, start: int) -> PromptLogprobs:
        """Those from this position on."""
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


@dataclass(slots=True)
class TokenDelta:
    """New tokens of one stream: `token_ids[i]` has the absolute output index `index + i`.

    Treat it as frozen. It is not, because one is made for every token: that takes three times as long when
    each field goes through `object.__setattr__`.
    """

    stream_id: int
    index: int
    token_ids: list[int]
    finish_reason: str | None = None  # stop | length | abort | error, on the last delta only
    num_cached_tokens: int = 0  # prompt tokens found in the cache, on the first delta only
    queue_s: float = 0.0  # submit to first scheduled, on the first delta only
    num_host_cached_tokens: int = 0  # of `num_cached_tokens`, those copied back from the host tier
    logprobs: list[TokenLogprob] | None = None  # one for each token, when asked for
    # Of a part of the prompt, before the first token and in order, when asked for.
    prompt_logprobs: PromptLogprobs | None = None

    def to_wire(self) -> list[Any]:
        short = [self.stream_id, self.index, self.token_ids]
        told = (
            self.finish_reason,
            self.num_cached_tokens,
            self.queue_s,
            self.num_host_cached_tokens,
        )
        if self.prompt_logprobs is not None:
            return [*short, *told, self.logprobs, self.prompt_logprobs.to_wire()]
        if self.logprobs is not None:
            return [*short, *told, self.logprobs]
        return [*short, *told] if any(told) else short  # all but two deltas of a stream

    @classmethod
    def from_wire(cls, values: list[Any]) -> TokenDelta:
        if len(values) <= 7:
            return cls(*values)
        *others, logprobs = values[:8]
        if logprobs is not None:
            logprobs = [TokenLogprob(*of_token) for of_token in logprobs]
        return cls(*others, logprobs, *map(PromptLogprobs.from_wire, values[8:]))


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """One new token for each of n streams, and nothing else to say about them: all but the first and the
    last delta of a stream, as columns, so that a token costs the replica no Python."""

    stream_ids: np.ndarray  # [n] int64
    index: np.ndarray  # [n] int32, absolute output index
    token_ids: np.ndarray  # [n] int32

    def __len__(self) -> int:
        return len(self.stream_ids)

    def __iter__(self) -> Iterator[TokenDelta]:
        tokens = self.token_ids[:, None].tolist()
        return map(TokenDelta, self.stream_ids.tolist(), self.index.tolist(), tokens)

    def to_wire(self) -> list[bytes]:
        return [
            self.stream_ids.astype("<i8", copy=False).tobytes(),
            self.index.astype("<i4", copy=False).tobytes(),
            self.token_ids.astype("<i4", copy=False).tobytes(),
        ]

    @classmethod
    def from_wire(cls, values: list[bytes]) -> TokenColumns:
        stream_ids, index, token_ids = map(np.frombuffer, values, ("<i8", "<i4", "<i4"))
        if not len(stream_ids) == len(index) == len(token_ids):
            raise WireError(
                f"TokenColumns: {len(stream_ids)} stream ids, {len(index)} indices and "
                f"{len(token_ids)} tokens"
            )
        return cls(stream_ids, index, token_ids)


def xor_hashes(hashes: np.ndarray) -> int:
    """XOR of [n] uint64; 0 of none."""
    return int(np.bitwise_xor.reduce(hashes)) if len(hashes) else 0


def tier_digest(gpu_xor: int, host_xor: int) -> int:
    """Digest of a cache, from the XOR of the hashes of each tier: `gpu_xor ^ (host_xor rotated left by 1)`.

    The rotation makes a hash count differently in the two tiers, so that one that changes tier changes the
    digest.
    """
    return gpu_xor ^ ((host_xor << 1 | host_xor >> 63) & (2**64 - 1))


_NO_HASHES = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """What one step changed in a replica's prefix cache, in routing hashes, applied in this order:
    cleared (both tiers), removed, stored. A hash is in one tier at a time; one that moves is removed from the
    old and stored in the new one by the same batch. `seq` counts these batches from 1 within an epoch, without
    gaps."""

    seq: int
    stored: np.ndarray  # [n] uint64, parents before children
    removed: np.ndarray  # [n] uint64
    cleared: bool = False
    host_stored: np.ndarray = field(default_factory=lambda: _NO_HASHES)  # [n] uint64, in no order
    host_removed: np.ndarray = field(default_factory=lambda: _NO_HASHES)  # [n] uint64

    def to_wire(self) -> list[Any]:
        return [
            self.seq,
            _hash_bytes(self.stored),
            _hash_bytes(self.removed),
            self.cleared,
            _hash_bytes(self.host_stored),
            _hash_bytes(self.host_removed),
        ]

    @classmethod
    def from_wire(cls, values: list[Any]) -> CacheEvents:
        seq, stored, removed, cleared, host_stored, host_removed = values
        return cls(
            seq,
            np.frombuffer(stored, "<u8"),
            np.frombuffer(removed, "<u8"),
            cleared,
            np.frombuffer(host_stored, "<u8"),
            np.frombuffer(host_removed, "<u8"),
        )


class Load(NamedTuple):
    """What a replica is doing, as the router's cost function needs it (DESIGN §5)."""

    num_running: int = 0  # rows with KV in the cache
    num_waiting: int = 0  # accepted, not yet scheduled
    queued_prefill_tokens: int = 0  # tokens still to prefill, waiting and running
    num_decode_tokens: int = 0  # KV tokens of the decoding rows
    blocks_free: int = 0
    blocks_cached: int = 0  # evictable, content known
    blocks_in_use: int = 0
    blocks_total: int = 0
    prefill_s_per_token: float = 0.0  # measured, exponential average; 0 = not yet known
    decode_step_s: float = 0.0  # measured seconds of a decode step; 0 = not yet known
    num_steps: int = 0  # counts up; the proof of progress
    num_compiles: int = 0  # kernels or graphs built since ready: stays 0
    num_preemptions: int = 0  # running requests that had to give up their blocks
    host_blocks_free: int = 0  # the host tier, in blocks as those of the device
    host_blocks_cached: int = 0
    host_blocks_in_use: int = 0
    host_blocks_total: int = 0
    num_offloads: int = 0  # preempted requests whose blocks were copied to the host tier
    num_restores: int = 0  # of them those that returned from there
    stalled_s: float = 0.0  # since the last step ended, while there is one to run; 0 when idle
    num_places: int | None = None  # requests that it takes before it refuses one; None = no bound
    num_routers: int = 1  # that are attached, and share these places
    # Waiting requests that the next steps start: rows that are free, none where the first in line lacks memory.
    num_startable: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """What a replica sends to one router after a step, or as a heartbeat.

    A step's tokens are in `columns`, or in `deltas` where there is more to say than one token: a stream is in
    one of the two.

    `events_seq` is the seq of the last cache event the replica has produced, with or without events in this
    frame, and `digest` that of all routing hashes it holds at that point (`tier_digest`): a router whose own
    replay differs asks for a snapshot.
    """

    epoch: str  # one engine incarnation
    deltas: list[TokenDelta] = field(default_factory=list)
    events: list[CacheEvents] = field(default_factory=list)
    events_seq: int = 0
    digest: int = 0
    load: Load = field(default_factory=Load)
    snapshot: np.ndarray | None = None  # [n] uint64: a page of all hashes in `gpu` at `events_seq`
    snapshot_more: bool = False  # another page follows
    columns: TokenColumns | None = None
    host_snapshot: np.ndarray = field(default_factory=lambda: _NO_HASHES)
    # [m] uint64: what the same page holds of the hashes in `host`

    def token_deltas(self) -> Iterator[TokenDelta]:
        """Every stream's news, whichever way it travelled."""
        return itertools.chain(self.deltas, self.columns or ())

    def encode(self) -> bytes:
        snapshot = None if self.snapshot is None else _hash_bytes(self.snapshot)
        return _seal(
            [
                self.epoch,
                [d.to_wire() for d in self.deltas],
                [e.to_wire() for e in self.events],
                self.events_seq,
                self.digest,
                self.load,
                snapshot,
                self.snapshot_more,
                None if self.columns is None else self.columns.to_wire(),
                _hash_bytes(self.host_snapshot),
            ]
        )

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        epoch, deltas, events, seq, digest, load, snapshot, more, columns, host_snapshot = _open(
            data, 10, "Frame"
        )
        return cls(
            epoch,
            [TokenDelta.from_wire(d) for d in deltas],
            [CacheEvents.from_wire(e) for e in events],
            seq,
            digest,
            Load(*load),
            None if snapshot is None else np.frombuffer(snapshot, "<u8"),
            more,
            None if columns is None else TokenColumns.from_wire(columns),
            np.frombuffer(host_snapshot, "<u8"),
        )


def _hash_bytes(hashes: np.ndarray) -> bytes:
    if not len(hashes):
        return b""
    return np.ascontiguousarray(hashes, dtype="<u8").tobytes()


_CHECKSUM_BYTES = 4


def _seal(values: list[Any]) -> bytes:
    """A message. The checksum costs a microsecond for each kilobyte; a token with a flipped bit would be served."""
    body: bytes = msgpack.packb([WIRE_VERSION, *values])
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little")


def _open(data: bytes, num_fields: int, name: str) -> list[Any]:
    """Check sum, version and arity, so that a damaged, foreign or truncated message is refused by name."""
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        raise WireError(f"{name}: the checksum does not fit these {len(data)} bytes")
    try:
        values = msgpack.unpackb(body)
    except Exception as error:
        raise WireError(f"{name}: not msgpack: {error}") from error
    if not isinstance(values, list) or not values or values[0] != WIRE_VERSION:
        version = values[0] if isinstance(values, list) and values else None
        raise WireError(f"{name}: wire version {version!r}, this side speaks {WIRE_VERSION}")
    if len(values) != num_fields + 1:
        raise WireError(f"{name}: {len(values) - 1} fields, expected {num_fields}")
    return values[1:]
