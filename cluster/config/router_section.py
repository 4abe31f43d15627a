"""The section `router` of an application's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from quire.cluster.config.section import NodePath, Section
from quire.router.policy.by_name import PolicyName


class RouterArgs(Section):
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
    decision_log_folder: NodePath | None = Field(
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

    def conflicts(self) -> Iterator[str]:
        if self.dispatch_window_s > self.max_wait_s:
            yield (
                f"dispatch_window_s ({self.dispatch_window_s}) must be at most max_wait_s "
                f"({self.max_wait_s})"
            )
