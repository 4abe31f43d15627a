"""The section `router` of an application's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from quire.cluster.config.section import NodePath, Section
from quire.router.policy.by_name import PolicyName


class RouterArgs(Section):
    """One router: how it places requests, what it accepts from clients and how long it waits."""

    policy: PolicyName = Field(
        default="slo",
        description="How the router chooses a replica. slo: the smallest cost in seconds for the time to the first "
        "token. e2e: the smallest cost for the whole answer. disaggregated: e2e with a pool of replicas "
        "(prefill_share) that only compute prompts and hand each stream over after its first token; needs the node's "
        "pool, and engine.peer_transport where replicas run on several nodes. round_robin, least_loaded, "
        "power_of_two and prefix_affinity are the known policies of these names, for comparison.",
    )
    prefill_share: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="Fraction of the replicas that only compute prompts with the policy disaggregated: at least one of "
        "them, and not all. It follows autoscaling.",
    )
    max_body_bytes: int = Field(
        default=8 * 1024**2,
        ge=1024,
        le=1024**3,
        description="Maximum size of a request body in bytes. A larger one is refused (HTTP 413).",
    )
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum length of a prompt in tokens. Default: the model's length.",
    )
    max_tokens_default: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of output tokens for a request without max_tokens. Default: up to the model's "
        "length.",
    )
    max_stop_strings: int = Field(
        default=16, ge=0, le=1024, description="Maximum number of stop strings in one request."
    )
    max_stop_bytes: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Maximum length of a stop string in bytes of UTF-8.",
    )
    stream_idle_timeout_s: float = Field(
        default=10.0,
        ge=2,
        le=600,
        description="Seconds without a frame from a replica after which the router considers the replica lost. An "
        "idle replica sends a heartbeat each second; a busy one sends nothing during a step.",
    )
    max_migrations: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="Maximum number of replicas that one request may lose without a new token and still "
        "continue on another one.",
    )
    migration_refill_s: float = Field(
        default=0.015,
        gt=0,
        le=3600,
        description="Seconds after which the cluster's migration budget grows by one migration; routers share the "
        "budget evenly. A migration computes the stream's prompt and output again. A stream that finds "
        "the budget empty waits, at most max_move_s.",
    )
    migration_burst: int = Field(
        default=2048,
        ge=1,
        le=1_000_000,
        description="Maximum number of migrations in the cluster's budget, and so at the same moment. 2048 is the "
        "number of streams on eight full replicas.",
    )
    max_move_s: float = Field(
        default=30.0,
        ge=0,
        le=600,
        description="Seconds for which a stream that has lost its replica looks for another one before it fails.",
    )
    max_wait_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds of estimated wait for the first token, from the measured speeds and the queue, above "
        "which a request is refused at once (HTTP 429) with the time after which to try again. A request "
        "that can start immediately is never refused.",
    )
    dispatch_window_s: float = Field(
        default=0.5,
        gt=0,
        le=60,
        description="Seconds of queued prefill up to which a replica receives requests immediately. Further requests "
        "wait at the router, where tenants share fairly. A smaller value is fairer; a value that is too "
        "small lets replicas run idle between two reports.",
    )
    max_replica_waiting_requests: int = Field(
        default=32,
        ge=0,
        le=65536,
        description="Number of requests waiting at a replica, for memory or for a row, up to which the router sends "
        "it more.",
    )
    max_queued_requests: int = Field(
        default=1024,
        ge=0,
        le=1_000_000,
        description="Maximum number of requests waiting at one router. A tenant (the key's, else `cache_salt`) may "
        "use as many places as are still free: a single tenant gets half of them, each of two tenants a third.",
    )
    max_queued_tokens: int = Field(
        default=4 * 1024**2,
        ge=0,
        le=2**40,
        description="Maximum number of prompt tokens of the requests waiting at one router, shared among tenants like"
        " max_queued_requests.",
    )
    fairness_quantum_tokens: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="Number of tokens by which a tenant may be ahead of others before the others are served first; a "
        "generated token counts as two. A smaller value is fairer over short times.",
    )
    max_watchers: int = Field(
        default=256,
        ge=0,
        le=65536,
        description="Maximum number of open streams that only watch at one router: gRPC's WatchCache, the health "
        "service's Watch, and open pages /ui. A further one is refused (RESOURCE_EXHAUSTED, HTTP 429).",
    )
    max_watchers_per_client: int = Field(
        default=64,
        ge=0,
        le=65536,
        description="Maximum number of these streams from one address, as seen by the proxy in front of the router.",
    )
    max_explained_decisions: int = Field(
        default=256,
        ge=0,
        le=1_000_000,
        description="Number of recent decisions that each router keeps for GET /v1/router/explain. Each takes 32 to "
        "170 bytes per replica.",
    )
    decision_log_folder: NodePath | None = Field(
        default=None,
        min_length=1,
        description="Folder on the router's node in which each router records its decisions for `quire router "
        "replay`, one JSON object per line: the known state of the replicas, sizes and seconds, but no "
        "prompts and no ids. Default: nothing is recorded.",
    )
    decision_log_bytes: int = Field(
        default=64 * 1024**2,
        ge=64 * 1024,
        description="Maximum size of one router's decision log in bytes. When it is exceeded, the older half is "
        "dropped. A decision takes about 300 bytes per replica.",
    )
    drain_timeout_s: float = Field(
        default=45.0,
        ge=0,
        le=3600,
        description="Seconds for which a draining replica lets its requests finish before they continue on other "
        "replicas. A router that shuts down also lets its open streams, which cannot migrate, finish "
        "within this time; the time starts after Serve's window for late requests (30 s by default) and "
        "is shorter if that window is longer.",
    )
    stream_credit_tokens: int = Field(
        default=256,
        ge=16,
        le=65536,
        description="Maximum number of tokens that a replica generates ahead of the client. At this number the "
        "request pauses until the client reads on.",
    )
    slow_client_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Seconds for which a client may leave tokens unread before its request ends with an error (408, "
        "ABORTED).",
    )
    ready_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="Seconds without a finished step after which a replica that has work no longer counts as ready "
        "for /ready. /health reports the router's process only.",
    )
    special_tokens_in_messages: bool = Field(
        default=False,
        description="Whether special tokens in the text of a message are treated as special tokens. By default only "
        "those that the chat template writes are, so that a message cannot start a turn of its own.",
    )
    tokenizer_threads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Number of threads that tokenize prompts, outside of the event loop.",
    )
    tokenizer_cache_bytes: int = Field(
        default=64 * 1024**2,
        ge=0,
        le=2**40,
        description="Maximum size of a router's cache of tokenized text in bytes. Texts are cached in parts that "
        "begin at special tokens, so that only the new part of a chat's next turn is tokenized. 0 turns "
        "the cache off.",
    )

    @property
    def pool_share(self) -> float:
        """Fraction of the replicas that only compute prompts with this policy."""
        return self.prefill_share if self.policy == "disaggregated" else 0.0

    def conflicts(self) -> Iterator[str]:
        if self.dispatch_window_s > self.max_wait_s:
            yield (
                f"dispatch_window_s ({self.dispatch_window_s}) must be at most max_wait_s "
                f"({self.max_wait_s})"
            )
