"""The arguments of the Quire application: one pydantic model, checked once, never written back.

`AppConfig` is what stands under `args:` of an application in a Serve config. Every field has a
default, a description and its unit in its name; an unknown key, a wrong type or a value out of
bounds is refused with its path, its value and, for a typo, the nearest known name. Imports neither
ray nor torch.
"""

from __future__ import annotations

import difflib
import os
import re
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from quire.protos.errors import InvalidRequest
from quire.router.policy.by_name import PolicyName
from quire.router.text.template_kwargs import check_template_kwargs

EMBEDDED_MODEL = "embedded"
# A path on the node that reads it; a leading ~ is the home of the user who runs Quire.
_Path = Annotated[str, AfterValidator(os.path.expanduser)]
# What browsers send as Origin: scheme and host, and the port if it is not the scheme's own.
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


# --------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration: where (`a.b[0].c`, empty for the whole) and what."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """A configuration that cannot be used; its text lists every problem, one a line."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest of `known`, or else the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def join_path(prefix: str, part: str | int) -> str:
    """Append a key (`.key`) or an index (`[0]`) to the path of a problem."""
    if isinstance(part, int):
        return f"{prefix}[{part}]"
    return f"{prefix}.{part}" if prefix else part


def problems_from(
    error: ValidationError, model: type[BaseModel] | None = None, prefix: str = ""
) -> list[Problem]:
    """Say in Quire's words what pydantic found.

    Parameters
    ----------
    error
        From validating `model`.
    model
        Its fields are the candidates of "did you mean"; None leaves unknown keys to the caller.
    prefix
        Path of the validated mapping inside the file.
    """
    problems = []
    for item in error.errors(include_url=False):
        path = prefix
        for part in item["loc"]:
            path = join_path(path, part)
        value = item["input"]
        if item["type"] == "extra_forbidden":
            if model is None:
                continue
            known = _fields_at(model, item["loc"][:-1])
            message = f"unknown key{did_you_mean(item['loc'][-1], known)}"
        elif item["type"] == "value_error":
            message = str(item["ctx"]["error"])
        else:
            message = f"{_bound(item['msg'])}, got {_short(value)}"
            if item["type"] == "literal_error" and isinstance(value, str):
                choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
                message += did_you_mean(value, choices).partition("; known")[0]
        problems.append(Problem(path, message))
    return problems


def _fields_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """Names of the fields of the nested model at `loc`."""
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        # A section that may be absent is annotated `Section | None`.
        sections = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        model = sections[0] if sections else annotation
    return [*model.model_fields, *model.aliases]


def _bound(message: str) -> str:
    """Pydantic's sentence in the words of a YAML file."""
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", message)
    return message.replace("Input should be", "must be").replace("Input should", "must")


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


# --------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------


def names_hub_model(model: str) -> bool:
    """Whether it has the form of a Hugging Face id, owner/name."""
    return _HUB_ID.fullmatch(model) is not None


class _Section(BaseModel):
    """Strict: YAML has types of its own, so `"2"` for a number and `true` for 1 are mistakes."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )
    aliases: ClassVar[dict[str, str]] = {}  # other names of fields

    @model_validator(mode="before")
    @classmethod
    def _resolve_aliases(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not cls.aliases.keys() & data.keys():
            return data
        for alias, name in cls.aliases.items():
            if alias in data and name in data:
                raise ValueError(f"{alias} is another name of {name}; give one of them")
        return {cls.aliases.get(key, key): value for key, value in data.items()}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for alias, name in cls.aliases.items():
            properties[alias] = {**properties[name], "description": f"The same as {name}."}
        return schema


class EngineArgs(_Section):
    """Limits of one replica's engine."""

    aliases: ClassVar[dict[str, str]] = {"allow_block_sharing": "prefix_caching"}

    block_size: int | None = Field(
        None,
        ge=8,
        le=256,
        description="Tokens of KV cache in one block, the unit of allocation and of prefix reuse; "
        "a power of two. Default: 64 on a GPU, 32 on a CPU.",
    )
    num_blocks: int | None = Field(
        None,
        ge=2,
        description="Blocks in the KV cache. Default: as many as the memory allows (kv_cache_gib, "
        "else max_memory_percent).",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="Memory of the KV cache in GiB. Default: what max_memory_percent leaves.",
    )
    cpu_offload_gib: float | None = Field(
        None,
        ge=0,
        description="Memory of the host tier in GiB: requests that a full cache evicts and cached "
        "prefixes that it drops go there and return without being computed again. 0 turns it off. "
        "Default: 4 beside a GPU, 0 on the CPU, where kv_cache_gib does the same without copies.",
    )
    restore: Literal["auto", "always"] = Field(
        "auto",
        description="auto: blocks in the host tier are copied back where that is faster than computing them again, by "
        "the copies and prefills measured so far. always: whatever was measured.",
    )
    max_memory_percent: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Fraction (0 to 1) of the device's memory that a replica may use for weights, "
        "activations and KV cache together.",
    )
    max_batch_tokens: int | None = Field(
        None,
        ge=8,
        description="Most tokens, prefill and decode together, in one step. Default: chosen for "
        "the device.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Most tokens of prompt and output together. Default: the checkpoint's own "
        "limit.",
    )
    max_running_requests: int = Field(
        256, ge=1, le=65536, description="Most requests that hold KV cache at a time."
    )
    max_waiting_requests: int = Field(
        1024,
        ge=0,
        le=1_000_000,
        description="Most requests that wait at a replica for a place. Routers send no more and let them "
        "wait on their side; of routers that send at once one may be refused as overloaded (HTTP 429).",
    )
    scheduler: Literal["shortest_first", "fifo", "prefill_first", "priority"] = Field(
        "shortest_first",
        description="Who comes first in a step. fifo: decodes, then started prompts, then new "
        "ones as they arrived. shortest_first: as fifo, but a prompt that waits is passed by shorter ones that come "
        "within four times the seconds by which it takes longer. prefill_first: started prompts, then decodes, "
        "then new ones. priority: as fifo, prompts by priority (smaller first), deadline, arrival; at least every "
        "eighth to start is the one that waits longest.",
    )
    weights: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="Weights of the linear layers in memory, the output head excepted. auto: in `dtype`, or as the "
        "checkpoint has them if that is FP8. int8: 8 bits with a scale for each output feature, on the CPU in "
        "bfloat16; loading still needs the memory of bfloat16. fp8: E4M3 with a scale for each output feature, "
        "activations with one for each token, in bfloat16 on a GPU of compute capability 8.9 or later; quantised "
        "while it is read, so loading needs no more. Experts of a mixture stay in `dtype`.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Keys and values in the cache. auto: as `dtype`. fp8: E4M3, half the memory of bfloat16, on a "
        "GPU; each head has a fixed scale, the checkpoint's (k_scale, v_scale) or 1.",
    )
    fuse: Literal["auto", "off"] = Field(
        "auto",
        description="Whether modules of the model give way to fused ones, each after proof on random input. "
        "auto: whatever is built like a known one, on a GPU or where the package was compiled. off: "
        "nothing.",
    )
    json_white_space: Literal["one_space", "none", "any"] = Field(
        "one_space",
        description="White space in output that follows a JSON schema. one_space: at most one space after a comma and "
        "a colon. none: none. any: all that JSON allows, as often as the model likes: small models then may write "
        "nothing else. A schema can override it with x-guidance.",
    )
    step_timeout_s: float = Field(
        10.0,
        ge=1,
        le=3600,
        description="Seconds after which a step counts as hung, if they are also more than five times "
        "what the measured speed foretold: the replica's process ends, Serve starts another, and its "
        "streams continue elsewhere.",
    )
    async_batching: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Plan and launch a step while the one before it runs, so that the device never "
        "waits for the host. auto: on a GPU. On the CPU there is nothing to overlap.",
    )
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Capture steps in which every request decodes, and replay them at a fraction of the host's work. "
        "auto: on a GPU, if the model can be captured; the log says why not. on: else the replica does not "
        "start.",
    )
    max_cached_graphs: int = Field(
        32,
        ge=1,
        le=1024,
        description="Most captured steps of different numbers of rows; the one used longest ago gives way to "
        "another.",
    )
    q_padding: int | None = Field(
        None,
        ge=0,
        description="Replay steps with prefill too, of at most 1024 tokens, padded to multiples of this many; at least "
        "4. 0: they run kernel by kernel. None: 256 on a GPU where cuda_graphs is not off, else 0.",
    )
    kv_padding: int | None = Field(
        None,
        ge=1,
        description="The length of their longest request is padded to multiples of this many tokens. None: to the "
        "longest possible, so that one graph serves all lengths.",
    )
    check_graphs: bool = Field(
        False,
        description="For debugging: before a captured step is replayed, compare the addresses of all it reads and "
        "writes with those at its capture.",
    )
    nvtx: bool = Field(
        False,
        description="For debugging on a GPU: mark the parts of the engine's loop and what they queue as ranges that "
        "Nsight Systems shows.",
    )
    max_prefill_ms: float | None = Field(
        100.0,
        ge=1,
        description="Milliseconds of prefill between two tokens of whoever decodes, by measured "
        "speed: so the time between tokens is at most this and a decode step. At least 16 tokens "
        "are computed. null: no bound but max_batch_tokens.",
    )
    safety_margin: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Fraction (0 to 1) of free blocks below which no new prompt is admitted while "
        "others decode.",
    )
    resume_margin: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Fraction (0 to 1) of free blocks from which prompts are admitted again after "
        "the cache was full and a request had to give up its blocks. Default: safety_margin + 0.1.",
    )
    prefix_caching: bool = Field(
        True,
        description="Reuse the KV of prompts that begin with the same tokens. Also known as "
        "allow_block_sharing.",
    )
    demotion_order: Literal["lru", "most_recent"] = Field(
        "lru",
        description="Which cached blocks are given up first: those of the prompt used longest ago, "
        "or of the one used last. Either way the end of a prompt goes before its beginning.",
    )
    deterministic: bool | None = Field(
        None,
        description="Give bit-equal tokens whatever the batch, chunking, cache or replica of one "
        "kind of device: on a GPU in any dtype, on the CPU in float32. Default: on for float32 on "
        "the CPU, otherwise off.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of one replica's matrix products. Default: the machine's cores "
        "shared among the replicas.",
    )
    fault_injection: bool = Field(
        False,
        description="For tests only: requests with certain ids crash, hang or fail the engine that "
        "runs them.",
    )
    heartbeat_ms: int = Field(
        100,
        ge=100,
        le=1000,
        description="Milliseconds between the first heartbeats of an idle replica; they back off "
        "to 1000.",
    )

    @field_validator("async_batching", "cuda_graphs", mode="before")
    @classmethod
    def _name_what_yaml_made_of_it(cls, value: Any) -> Any:
        """YAML 1.1 reads on and off as true and false."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int | None) -> int | None:
        # So that it divides the 64 tokens of a routing block or is a multiple of them
        # (protos/wire.py).
        if value is not None and value & (value - 1):
            raise ValueError(f"must be a power of two from 8 to 256, got {value}")
        return value

    @model_validator(mode="after")
    def _margins_in_order(self) -> EngineArgs:
        if self.resume_margin is not None and self.resume_margin < self.safety_margin:
            raise ValueError(
                f"resume_margin ({self.resume_margin}) must be at least safety_margin "
                f"({self.safety_margin})"
            )
        return self

    @model_validator(mode="after")
    def _one_cache_size(self) -> EngineArgs:
        if self.num_blocks is not None and self.kv_cache_gib is not None:
            raise ValueError(
                f"num_blocks ({self.num_blocks}) and kv_cache_gib ({self.kv_cache_gib}) both set "
                "the size of the KV cache; give one of them"
            )
        return self


class RouterArgs(_Section):
    """One router: how it places requests, what it accepts from clients and how long it waits."""

    policy: PolicyName = Field(
        "slo",
        description="How a replica is chosen. slo: the smallest cost in seconds, for time to first "
        "token; e2e: the same, for the whole answer; the others are what they say, for comparison.",
    )
    max_body_bytes: int = Field(
        8 * 1024**2,
        ge=1024,
        le=1024**3,
        description="Largest request body in bytes; a larger one is refused (HTTP 413).",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longest prompt in tokens. Default: the model's length."
    )
    max_tokens_default: int | None = Field(
        None,
        ge=1,
        description="Output tokens of a request that names no max_tokens. Default: up to the "
        "model's length.",
    )
    max_stop_strings: int = Field(
        16, ge=0, le=1024, description="Most stop strings in one request."
    )
    max_stop_bytes: int = Field(
        256, ge=1, le=65536, description="Longest stop string in bytes of UTF-8."
    )
    stream_idle_timeout_s: float = Field(
        10.0,
        ge=2,
        le=600,
        description="Seconds without any frame from a replica after which the router takes it for "
        "lost. An idle one sends a heartbeat each second; a busy one is silent during a step.",
    )
    max_migrations: int = Field(
        3,
        ge=0,
        le=1000,
        description="Most replicas that one request may lose and still continue on another.",
    )
    migration_refill_s: float = Field(
        0.015,
        gt=0,
        le=3600,
        description="Seconds after which the cluster's budget of moves has one more; routers share it evenly. A "
        "move computes its prompt and answer anew; a stream that finds the budget empty waits, at most max_move_s.",
    )
    migration_burst: int = Field(
        2048,
        ge=1,
        le=1_000_000,
        description="Most moves at once in the cluster: its full budget. 2048 are the streams of eight full "
        "replicas.",
    )
    max_move_s: float = Field(
        30.0,
        ge=0,
        le=600,
        description="Seconds for which a stream that has lost its replica looks for another one.",
    )
    max_wait_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Seconds that a request may have to wait for its first token, by the measured speeds and "
        "what is queued before it: beyond that it is refused at once (HTTP 429) with the time after which to "
        "try again. One that can go at once is never refused.",
    )
    dispatch_window_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="Seconds of prefill that a replica has queued while requests go there at once; beyond "
        "it they wait at the router, where tenants share fairly. Smaller is fairer, too small lets "
        "replicas run dry between two reports.",
    )
    max_replica_waiting_requests: int = Field(
        32,
        ge=0,
        le=65536,
        description="Requests that wait at a replica, for memory or a place, while others still go there.",
    )
    max_queued_requests: int = Field(
        1024,
        ge=0,
        le=1_000_000,
        description="Most requests that wait at one router. A tenant (`cache_salt`) may have as many of "
        "them as are still free: one alone half, two a third each.",
    )
    max_queued_tokens: int = Field(
        4 * 1024**2,
        ge=0,
        le=2**40,
        description="Most prompt tokens of those that wait at one router, shared like max_queued_requests.",
    )
    fairness_quantum_tokens: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="By so many tokens, a generated one counting as two, a tenant may be ahead of the others "
        "before it is their turn. Smaller is fairer over short times.",
    )
    max_watchers: int = Field(
        256,
        ge=0,
        le=65536,
        description="Most gRPC streams of WatchCache and of the health service's Watch that one router has open; one "
        "more is refused (RESOURCE_EXHAUSTED).",
    )
    max_watchers_per_client: int = Field(
        64,
        ge=0,
        le=65536,
        description="Most of these streams from one address, as the proxy in front of the router sees it.",
    )
    max_explained_decisions: int = Field(
        256,
        ge=0,
        le=1_000_000,
        description="Last decisions that each router remembers for GET /v1/router/explain; each takes "
        "32 to 170 bytes per replica.",
    )
    decision_log_folder: _Path | None = Field(
        None,
        min_length=1,
        description="Folder on the router's node to which each router writes its decisions, one JSON "
        "object a line, for `quire router replay`: what was known of the replicas, sizes and seconds, "
        "no prompt and no id. Default: nothing is recorded.",
    )
    decision_log_bytes: int = Field(
        64 * 1024**2,
        ge=64 * 1024,
        description="Most bytes that the log of one router takes; beyond it the oldest half goes. A "
        "decision takes about 300 per replica.",
    )
    drain_timeout_s: float = Field(
        45.0,
        ge=0,
        le=3600,
        description="Seconds for which a replica that goes away lets its requests finish; then they "
        "continue on others. Also those for which a router that shuts down lets its open streams "
        "finish, since they cannot move, when Serve's window for late requests (by default 30 s; "
        "a longer one is at its cost) is over.",
    )
    stream_credit_tokens: int = Field(
        256,
        ge=16,
        le=65536,
        description="Most tokens that a replica generates ahead of what the client has read; then the "
        "request pauses, until the client reads on.",
    )
    slow_client_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Seconds for which a client may leave tokens unread; then its request ends with "
        "an error (408, ABORTED).",
    )
    ready_timeout_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Seconds without a finished step after which a replica that has work no longer "
        "counts for /ready. /health is about the router's process alone.",
    )
    special_tokens_in_messages: bool = Field(
        False,
        description="Whether special tokens in the text of a message count as such. By default only those that the "
        "chat template writes do, so that a message cannot begin a turn of its own.",
    )
    tokenizer_threads: int = Field(
        2, ge=1, le=64, description="Threads that tokenise prompts, off the event loop."
    )
    tokenizer_cache_bytes: int = Field(
        64 * 1024**2,
        ge=0,
        le=2**40,
        description="Most bytes of tokenised text that a router remembers, by the parts that begin at special "
        "tokens: of a chat's next turn only the new part is tokenised. 0 turns it off.",
    )

    @model_validator(mode="after")
    def _window_within_wait(self) -> RouterArgs:
        if self.dispatch_window_s > self.max_wait_s:
            raise ValueError(
                f"dispatch_window_s ({self.dispatch_window_s}) must be at most max_wait_s "
                f"({self.max_wait_s})"
            )
        return self


class HttpArgs(_Section):
    """What each router's HTTP front end does."""

    keepalive_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="Seconds after which a stream without its first token sends a comment (`: keep-alive`), again and "
        "again, so that no proxy takes the connection for dead. Its status and headers go out with the first comment, "
        "so a later refusal is an error event. Some clients fail on any comment. 0 turns it off.",
    )
    cors_origins: list[str] = Field(
        [],
        max_length=256,
        description="Origins of web pages whose scripts may call this API from a browser, such as "
        "https://chat.example.com; '*' allows all pages. Browsers send no cookies. Default: none.",
    )

    @field_validator("cors_origins")
    @classmethod
    def _as_browsers_send_them(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"each origin must be '*', or scheme and host in lower case with a port if it is not the usual "
                    f"one, such as 'https://chat.example.com', got {_short(origin)}"
                )
        return origins


class AutoscalingArgs(_Section):
    """How many replicas there are, by what the engines have to do (`cluster/autoscaling.py`)."""

    min_replicas: int = Field(1, ge=1, le=1024, description="Fewest replicas.")
    max_replicas: int = Field(4, ge=1, le=1024, description="Most replicas.")
    target_queued_prefill_s: float | None = Field(
        2.0,
        gt=0,
        le=3600,
        description="Seconds of prefill queued for one replica, there and at the routers, above which more "
        "replicas are wanted. null: does not count.",
    )
    target_kv_in_use: float | None = Field(
        0.8,
        gt=0,
        le=1,
        description="Fraction (0 to 1) of a replica's KV cache held by requests above which more replicas are "
        "wanted. null: does not count.",
    )
    target_requests: float | None = Field(
        None,
        gt=0,
        description="Requests on one replica, running and waiting, above which more replicas are wanted: for "
        "decoding that gets too slow. Default: does not count.",
    )
    upscale_delay_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Seconds for which more replicas must be wanted until they are started.",
    )
    downscale_delay_s: float = Field(
        300.0,
        ge=0,
        le=86400,
        description="Seconds for which fewer replicas must be wanted until some are drained: a cache is lost "
        "with each.",
    )
    look_back_s: float = Field(
        10.0, ge=1, le=3600, description="Seconds over which replicas' reports are averaged."
    )
    report_interval_s: float = Field(
        2.0, ge=0.1, le=600, description="Seconds between two reports of a replica to Serve."
    )

    @model_validator(mode="after")
    def _some_target(self) -> AutoscalingArgs:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) must be at most max_replicas "
                f"({self.max_replicas})"
            )
        targets = (self.target_queued_prefill_s, self.target_kv_in_use, self.target_requests)
        if targets == (None, None, None):
            raise ValueError("at least one target_* must be given")
        return self


class ReplicaResources(_Section):
    """What Ray reserves for one replica when it places it; a reservation, not a limit."""

    num_cpus: float = Field(
        0.25,
        ge=0,
        description="CPUs reserved per replica. Small, so that two replicas and two routers fit "
        "one core.",
    )
    num_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs reserved per replica. Default: 1 where the device is cuda, otherwise 0.",
    )
    memory_gib: float | None = Field(
        None, gt=0, description="Memory reserved per replica in GiB. Default: none."
    )


class RouterResources(_Section):
    """What Ray reserves for one router when it places it; a reservation, not a limit."""

    num_cpus: float = Field(0.1, ge=0, description="CPUs reserved per router.")
    memory_gib: float | None = Field(
        None, gt=0, description="Memory reserved per router in GiB. Default: none."
    )


class AppConfig(_Section):
    """Arguments of one Quire application, which serves one model."""

    model: _Path = Field(
        EMBEDDED_MODEL,
        min_length=1,
        description="What to serve: 'embedded' (the small model inside the package), a checkpoint "
        "folder, or a Hugging Face id. Weights are read from safetensors only and no code of a "
        "checkpoint is run.",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Branch, tag or commit of a Hugging Face id. Default: its main branch.",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Name that requests give as `model`. Default: the id, or the folder's own "
        "name.",
    )
    chat_template: _Path | None = Field(
        None,
        min_length=1,
        description="Path to a Jinja file with the chat template. Default: the checkpoint's.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="Variables for the chat template of every request, `enable_thinking: false` for instance; a "
        "request's own `chat_template_kwargs` go over them.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where replicas compute; auto takes a GPU if the cluster has one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and KV cache; auto takes float32 on the CPU and the "
        "checkpoint's own type on a GPU.",
    )
    replicas: int = Field(2, ge=1, le=1024, description="Copies of the engine, one device each.")
    routers: int = Field(2, ge=1, le=64, description="Copies of the HTTP and gRPC front end.")
    autoscaling: AutoscalingArgs | None = Field(
        None,
        description="Let Serve change the number of replicas with the load; `replicas` is then the number "
        "to begin with. Default: there are always `replicas`.",
    )
    engine: EngineArgs = Field(EngineArgs(), description="Limits of each replica's engine.")
    router: RouterArgs = Field(RouterArgs(), description="Limits of each router.")
    http: HttpArgs = Field(HttpArgs(), description="The routers' HTTP front end.")
    replica_resources: ReplicaResources = Field(
        ReplicaResources(), description="What Ray reserves for each replica."
    )
    router_resources: RouterResources = Field(
        RouterResources(), description="What Ray reserves for each router."
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _plain_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        try:
            check_template_kwargs(kwargs)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
        return kwargs

    @model_validator(mode="after")
    def _consistent(self) -> AppConfig:
        if self.model != EMBEDDED_MODEL and not self.is_folder and not names_hub_model(self.model):
            raise ValueError(
                f"model {self.model!r} is neither 'embedded', nor a folder (a path that begins "
                "with '/', './', '../' or '~'), nor a Hugging Face id such as 'Qwen/Qwen3-8B'"
            )
        if self.revision is not None and (self.is_folder or self.model == EMBEDDED_MODEL):
            raise ValueError(
                f"revision {self.revision!r} needs a Hugging Face id, but model is {self.model!r}"
            )
        scaling = self.autoscaling
        if scaling and not scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            raise ValueError(
                f"replicas must be from autoscaling.min_replicas ({scaling.min_replicas}) to "
                f"autoscaling.max_replicas ({scaling.max_replicas}), got {self.replicas}"
            )
        if self.device == "cpu" and self.replica_resources.num_gpus:
            raise ValueError(
                f"replica_resources.num_gpus must be 0 with device 'cpu', got "
                f"{self.replica_resources.num_gpus}"
            )
        if self.device == "cuda" and self.replica_resources.num_gpus == 0:
            raise ValueError("replica_resources.num_gpus must be above 0 with device 'cuda', got 0")
        return self

    @property
    def is_folder(self) -> bool:
        """Whether `model` is a path; a relative one is written with a leading './' or '../'."""
        return self.model.startswith(("/", "./", "../"))

    @property
    def max_replicas(self) -> int:
        """The most replicas that there can be."""
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas

    @property
    def model_name(self) -> str:
        """The name that clients give as `model`."""
        if self.served_model_name is not None:
            return self.served_model_name
        return self.model.rstrip("/").rpartition("/")[2] if self.is_folder else self.model

    @classmethod
    def from_args(cls, args: dict[str, Any], path: str = "") -> AppConfig:
        """Check the `args` of an application.

        Parameters
        ----------
        args
            The mapping as read from YAML.
        path
            Where it stands in the file (`applications[0].args`), for the messages.

        Raises
        ------
        ConfigError
            With every problem found.
        """
        try:
            return cls.model_validate(args)
        except ValidationError as error:
            raise ConfigError(problems_from(error, cls, path)) from None
