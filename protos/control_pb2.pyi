from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "revision", "created_s", "max_model_len", "vocab_size", "dtype", "eos_token_ids", "block_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    created_s: int
    max_model_len: int
    vocab_size: int
    dtype: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., created_s: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "digest", "created_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    created_s: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., created_s: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaLoad]
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaLoad, _Mapping]]] = ...) -> None: ...

class ReplicaLoad(_message.Message):
    __slots__ = ("replica", "epoch", "attached", "report_age_ms", "num_running", "num_waiting", "queued_prefill_tokens", "num_decode_tokens", "prefill_ms_per_token", "decode_step_ms", "num_steps", "num_compiles", "num_preemptions", "cache")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    replica: str
    epoch: str
    attached: bool
    report_age_ms: float
    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    num_decode_tokens: int
    prefill_ms_per_token: float
    decode_step_ms: float
    num_steps: int
    num_compiles: int
    num_preemptions: int
    cache: CacheOccupancy
    def __init__(self, replica: _Optional[str] = ..., epoch: _Optional[str] = ..., attached: bool = ..., report_age_ms: _Optional[float] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., prefill_ms_per_token: _Optional[float] = ..., decode_step_ms: _Optional[float] = ..., num_steps: _Optional[int] = ..., num_compiles: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., cache: _Optional[_Union[CacheOccupancy, _Mapping]] = ...) -> None: ...

class WatchCacheRequest(_message.Message):
    __slots__ = ("period_ms",)
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    period_ms: int
    def __init__(self, period_ms: _Optional[int] = ...) -> None: ...

class WatchCacheResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaCache]
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaCache, _Mapping]]] = ...) -> None: ...

class ReplicaCache(_message.Message):
    __slots__ = ("replica", "epoch", "attached", "report_age_ms", "cache", "indexed_blocks")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    epoch: str
    attached: bool
    report_age_ms: float
    cache: CacheOccupancy
    indexed_blocks: int
    def __init__(self, replica: _Optional[str] = ..., epoch: _Optional[str] = ..., attached: bool = ..., report_age_ms: _Optional[float] = ..., cache: _Optional[_Union[CacheOccupancy, _Mapping]] = ..., indexed_blocks: _Optional[int] = ...) -> None: ...

class CacheOccupancy(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierOccupancy]
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierOccupancy, _Mapping]]] = ...) -> None: ...

class TierOccupancy(_message.Message):
    __slots__ = ("tier", "blocks_free", "blocks_cached", "blocks_in_use", "blocks_total", "blocks_retained")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RETAINED_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    blocks_free: int
    blocks_cached: int
    blocks_in_use: int
    blocks_total: int
    blocks_retained: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_in_use: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_retained: _Optional[int] = ...) -> None: ...

class WatchRouterRequest(_message.Message):
    __slots__ = ("period_ms",)
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    period_ms: int
    def __init__(self, period_ms: _Optional[int] = ...) -> None: ...

class WatchRouterResponse(_message.Message):
    __slots__ = ("router", "num_routers", "model", "now_s", "queue", "num_decisions", "num_deltas", "ttft_median_ms", "ttft_p95_ms", "replicas", "requests", "moves", "routers", "regrets")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    NUM_DECISIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DELTAS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MEDIAN_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_P95_MS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    REGRETS_FIELD_NUMBER: _ClassVar[int]
    router: str
    num_routers: int
    model: str
    now_s: float
    queue: RouterQueue
    num_decisions: int
    num_deltas: int
    ttft_median_ms: float
    ttft_p95_ms: float
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaState]
    requests: _containers.RepeatedCompositeFieldContainer[RoutedRequest]
    moves: _containers.RepeatedCompositeFieldContainer[RoutedRequest]
    routers: _containers.RepeatedScalarFieldContainer[str]
    regrets: _containers.RepeatedCompositeFieldContainer[RoutingRegret]
    def __init__(self, router: _Optional[str] = ..., num_routers: _Optional[int] = ..., model: _Optional[str] = ..., now_s: _Optional[float] = ..., queue: _Optional[_Union[RouterQueue, _Mapping]] = ..., num_decisions: _Optional[int] = ..., num_deltas: _Optional[int] = ..., ttft_median_ms: _Optional[float] = ..., ttft_p95_ms: _Optional[float] = ..., replicas: _Optional[_Iterable[_Union[ReplicaState, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[RoutedRequest, _Mapping]]] = ..., moves: _Optional[_Iterable[_Union[RoutedRequest, _Mapping]]] = ..., routers: _Optional[_Iterable[str]] = ..., regrets: _Optional[_Iterable[_Union[RoutingRegret, _Mapping]]] = ...) -> None: ...

class RoutingRegret(_message.Message):
    __slots__ = ("policy", "num_requests", "mean_ms", "low_ms", "high_ms", "modelled_ms", "measured_ms")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MEAN_MS_FIELD_NUMBER: _ClassVar[int]
    LOW_MS_FIELD_NUMBER: _ClassVar[int]
    HIGH_MS_FIELD_NUMBER: _ClassVar[int]
    MODELLED_MS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_MS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    num_requests: int
    mean_ms: float
    low_ms: float
    high_ms: float
    modelled_ms: float
    measured_ms: float
    def __init__(self, policy: _Optional[str] = ..., num_requests: _Optional[int] = ..., mean_ms: _Optional[float] = ..., low_ms: _Optional[float] = ..., high_ms: _Optional[float] = ..., modelled_ms: _Optional[float] = ..., measured_ms: _Optional[float] = ...) -> None: ...

class RouterQueue(_message.Message):
    __slots__ = ("num_requests", "num_prompt_tokens", "expected_wait_ms")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_prompt_tokens: int
    expected_wait_ms: float
    def __init__(self, num_requests: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., expected_wait_ms: _Optional[float] = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("load", "state", "prompt_tokens", "cached_tokens", "predicted_tokens")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    load: ReplicaLoad
    state: str
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    def __init__(self, load: _Optional[_Union[ReplicaLoad, _Mapping]] = ..., state: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., predicted_tokens: _Optional[int] = ...) -> None: ...

class RoutedRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "decided_s", "prompt_tokens", "left_replica", "best", "runner_up", "ttft_ms", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECIDED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEFT_REPLICA_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    decided_s: float
    prompt_tokens: int
    left_replica: str
    best: ReplicaCost
    runner_up: ReplicaCost
    ttft_ms: float
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., decided_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., left_replica: _Optional[str] = ..., best: _Optional[_Union[ReplicaCost, _Mapping]] = ..., runner_up: _Optional[_Union[ReplicaCost, _Mapping]] = ..., ttft_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ReplicaCost(_message.Message):
    __slots__ = ("replica", "cost_ms", "terms_ms", "cached_tokens")
    class TermsMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    COST_MS_FIELD_NUMBER: _ClassVar[int]
    TERMS_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    cost_ms: float
    terms_ms: _containers.ScalarMap[str, float]
    cached_tokens: int
    def __init__(self, replica: _Optional[str] = ..., cost_ms: _Optional[float] = ..., terms_ms: _Optional[_Mapping[str, float]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
