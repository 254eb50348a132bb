from baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_JOINING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DOWN: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_LEFT: _ClassVar[WorkerState]
    WORKER_STATE_EJECTED: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]

class PairState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAIR_STATE_UNSPECIFIED: _ClassVar[PairState]
    PAIR_STATE_UNPROVEN: _ClassVar[PairState]
    PAIR_STATE_PROVEN: _ClassVar[PairState]
    PAIR_STATE_BROKEN: _ClassVar[PairState]

class ComponentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPONENT_STATE_UNSPECIFIED: _ClassVar[ComponentState]
    COMPONENT_STATE_OK: _ClassVar[ComponentState]
    COMPONENT_STATE_DEGRADED: _ClassVar[ComponentState]
    COMPONENT_STATE_DOWN: _ClassVar[ComponentState]

class RequestPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_PHASE_UNSPECIFIED: _ClassVar[RequestPhase]
    REQUEST_PHASE_QUEUED: _ClassVar[RequestPhase]
    REQUEST_PHASE_PREFILLING: _ClassVar[RequestPhase]
    REQUEST_PHASE_PARKED: _ClassVar[RequestPhase]
    REQUEST_PHASE_BINDING: _ClassVar[RequestPhase]
    REQUEST_PHASE_DECODING: _ClassVar[RequestPhase]
    REQUEST_PHASE_ENDED: _ClassVar[RequestPhase]

class PlacedPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACED_PHASE_UNSPECIFIED: _ClassVar[PlacedPhase]
    PLACED_PHASE_PREFILL: _ClassVar[PlacedPhase]
    PLACED_PHASE_DECODE: _ClassVar[PlacedPhase]
    PLACED_PHASE_UNSPLIT: _ClassVar[PlacedPhase]
    PLACED_PHASE_PARK: _ClassVar[PlacedPhase]

class LeftOutReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEFT_OUT_REASON_UNSPECIFIED: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_NOT_READY: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_TOO_LONG: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_OTHER_FINGERPRINT: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_BARRED: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_NO_TAKER: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_BLAMED: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_UNTRIED: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_CLAIMED: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_REFUSED: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_NO_BLOCKS: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_FULL_BATCH: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_QUEUE_LIMIT: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_NO_DECODE_ROOM: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_EJECTED: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_KEPT: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_RESERVED: _ClassVar[LeftOutReason]
    LEFT_OUT_REASON_OVER_SHARE: _ClassVar[LeftOutReason]

class UnsplitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSPLIT_REASON_UNSPECIFIED: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_NEVER: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_QUEUE: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_PREFIX: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_HANDOFF: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_SPEED: _ClassVar[UnsplitReason]

class SplitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPLIT_REASON_UNSPECIFIED: _ClassVar[SplitReason]
    SPLIT_REASON_CHEAPER: _ClassVar[SplitReason]
    SPLIT_REASON_NO_ROOM: _ClassVar[SplitReason]
    SPLIT_REASON_UNKNOWN: _ClassVar[SplitReason]

class PrefixComputedReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_COMPUTED_REASON_UNSPECIFIED: _ClassVar[PrefixComputedReason]
    PREFIX_COMPUTED_REASON_COSTS_MORE: _ClassVar[PrefixComputedReason]
    PREFIX_COMPUTED_REASON_BUSY: _ClassVar[PrefixComputedReason]

class Decider(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECIDER_UNSPECIFIED: _ClassVar[Decider]
    DECIDER_TERM: _ClassVar[Decider]
    DECIDER_TIE: _ClassVar[Decider]
    DECIDER_ONLY: _ClassVar[Decider]
    DECIDER_AGED: _ClassVar[Decider]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_JOINING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DOWN: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_LEFT: WorkerState
WORKER_STATE_EJECTED: WorkerState
WORKER_STATE_LOADING: WorkerState
PAIR_STATE_UNSPECIFIED: PairState
PAIR_STATE_UNPROVEN: PairState
PAIR_STATE_PROVEN: PairState
PAIR_STATE_BROKEN: PairState
COMPONENT_STATE_UNSPECIFIED: ComponentState
COMPONENT_STATE_OK: ComponentState
COMPONENT_STATE_DEGRADED: ComponentState
COMPONENT_STATE_DOWN: ComponentState
REQUEST_PHASE_UNSPECIFIED: RequestPhase
REQUEST_PHASE_QUEUED: RequestPhase
REQUEST_PHASE_PREFILLING: RequestPhase
REQUEST_PHASE_PARKED: RequestPhase
REQUEST_PHASE_BINDING: RequestPhase
REQUEST_PHASE_DECODING: RequestPhase
REQUEST_PHASE_ENDED: RequestPhase
PLACED_PHASE_UNSPECIFIED: PlacedPhase
PLACED_PHASE_PREFILL: PlacedPhase
PLACED_PHASE_DECODE: PlacedPhase
PLACED_PHASE_UNSPLIT: PlacedPhase
PLACED_PHASE_PARK: PlacedPhase
LEFT_OUT_REASON_UNSPECIFIED: LeftOutReason
LEFT_OUT_REASON_NOT_READY: LeftOutReason
LEFT_OUT_REASON_TOO_LONG: LeftOutReason
LEFT_OUT_REASON_OTHER_FINGERPRINT: LeftOutReason
LEFT_OUT_REASON_BARRED: LeftOutReason
LEFT_OUT_REASON_NO_TAKER: LeftOutReason
LEFT_OUT_REASON_BLAMED: LeftOutReason
LEFT_OUT_REASON_UNTRIED: LeftOutReason
LEFT_OUT_REASON_CLAIMED: LeftOutReason
LEFT_OUT_REASON_REFUSED: LeftOutReason
LEFT_OUT_REASON_NO_BLOCKS: LeftOutReason
LEFT_OUT_REASON_FULL_BATCH: LeftOutReason
LEFT_OUT_REASON_QUEUE_LIMIT: LeftOutReason
LEFT_OUT_REASON_NO_DECODE_ROOM: LeftOutReason
LEFT_OUT_REASON_EJECTED: LeftOutReason
LEFT_OUT_REASON_KEPT: LeftOutReason
LEFT_OUT_REASON_RESERVED: LeftOutReason
LEFT_OUT_REASON_OVER_SHARE: LeftOutReason
UNSPLIT_REASON_UNSPECIFIED: UnsplitReason
UNSPLIT_REASON_NEVER: UnsplitReason
UNSPLIT_REASON_QUEUE: UnsplitReason
UNSPLIT_REASON_PREFIX: UnsplitReason
UNSPLIT_REASON_HANDOFF: UnsplitReason
UNSPLIT_REASON_SPEED: UnsplitReason
SPLIT_REASON_UNSPECIFIED: SplitReason
SPLIT_REASON_CHEAPER: SplitReason
SPLIT_REASON_NO_ROOM: SplitReason
SPLIT_REASON_UNKNOWN: SplitReason
PREFIX_COMPUTED_REASON_UNSPECIFIED: PrefixComputedReason
PREFIX_COMPUTED_REASON_COSTS_MORE: PrefixComputedReason
PREFIX_COMPUTED_REASON_BUSY: PrefixComputedReason
DECIDER_UNSPECIFIED: Decider
DECIDER_TERM: Decider
DECIDER_TIE: Decider
DECIDER_ONLY: Decider
DECIDER_AGED: Decider

class WorkerDescription(_message.Message):
    __slots__ = ("worker_id", "roles", "address", "incarnation", "pid", "layout", "num_blocks", "max_model_len", "max_num_seqs", "host_id", "vocab_size", "device", "fingerprint", "kernels", "capacity", "num_tier_blocks", "withheld")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    NUM_TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    roles: _containers.RepeatedScalarFieldContainer[_types_pb2.WorkerRole]
    address: str
    incarnation: int
    pid: int
    layout: _types_pb2.KVLayout
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    host_id: str
    vocab_size: int
    device: str
    fingerprint: _types_pb2.Fingerprint
    kernels: str
    capacity: float
    num_tier_blocks: int
    withheld: str
    def __init__(self, worker_id: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[_types_pb2.WorkerRole, str]]] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.KVLayout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., host_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., device: _Optional[str] = ..., fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., kernels: _Optional[str] = ..., capacity: _Optional[float] = ..., num_tier_blocks: _Optional[int] = ..., withheld: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker", "loading")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerDescription
    loading: LoadingWorker
    def __init__(self, worker: _Optional[_Union[WorkerDescription, _Mapping]] = ..., loading: _Optional[_Union[LoadingWorker, _Mapping]] = ...) -> None: ...

class LoadingWorker(_message.Message):
    __slots__ = ("worker_id", "roles", "model_id", "ready_within_ms", "progress")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    READY_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    roles: _containers.RepeatedScalarFieldContainer[_types_pb2.WorkerRole]
    model_id: str
    ready_within_ms: int
    progress: str
    def __init__(self, worker_id: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[_types_pb2.WorkerRole, str]]] = ..., model_id: _Optional[str] = ..., ready_within_ms: _Optional[int] = ..., progress: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("router_incarnation", "interval_ms")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: int
    interval_ms: int
    def __init__(self, router_incarnation: _Optional[int] = ..., interval_ms: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("router_incarnation", "router_pid", "ready", "workers", "num_queued", "num_prefilling", "num_parked", "num_decoding", "models", "pairs", "http_port", "up_ms", "components", "port", "has_http_tls")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_PID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLING_FIELD_NUMBER: _ClassVar[int]
    NUM_PARKED_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODING_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    HTTP_PORT_FIELD_NUMBER: _ClassVar[int]
    UP_MS_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    HAS_HTTP_TLS_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: int
    router_pid: int
    ready: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    num_queued: int
    num_prefilling: int
    num_parked: int
    num_decoding: int
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    pairs: _containers.RepeatedCompositeFieldContainer[PairStatus]
    http_port: int
    up_ms: int
    components: _containers.RepeatedCompositeFieldContainer[Component]
    port: int
    has_http_tls: bool
    def __init__(self, router_incarnation: _Optional[int] = ..., router_pid: _Optional[int] = ..., ready: _Optional[bool] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., num_queued: _Optional[int] = ..., num_prefilling: _Optional[int] = ..., num_parked: _Optional[int] = ..., num_decoding: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ..., http_port: _Optional[int] = ..., up_ms: _Optional[int] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., port: _Optional[int] = ..., has_http_tls: _Optional[bool] = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("name", "state", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: ComponentState
    reason: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[ComponentState, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model_id", "ready", "context_tokens", "num_workers", "num_queued", "num_live", "kv_groups", "split_break_even", "policy", "prefix_break_even")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_BREAK_EVEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BREAK_EVEN_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    ready: bool
    context_tokens: int
    num_workers: int
    num_queued: int
    num_live: int
    kv_groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    split_break_even: SplitBreakEven
    policy: str
    prefix_break_even: PrefixBreakEven
    def __init__(self, model_id: _Optional[str] = ..., ready: _Optional[bool] = ..., context_tokens: _Optional[int] = ..., num_workers: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_live: _Optional[int] = ..., kv_groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ..., split_break_even: _Optional[_Union[SplitBreakEven, _Mapping]] = ..., policy: _Optional[str] = ..., prefix_break_even: _Optional[_Union[PrefixBreakEven, _Mapping]] = ...) -> None: ...

class PrefixBreakEven(_message.Message):
    __slots__ = ("source", "target", "tokens", "fixed_ms", "token_ms", "num_seen")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIXED_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEEN_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    tokens: int
    fixed_ms: float
    token_ms: float
    num_seen: int
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., tokens: _Optional[int] = ..., fixed_ms: _Optional[float] = ..., token_ms: _Optional[float] = ..., num_seen: _Optional[int] = ...) -> None: ...

class SplitBreakEven(_message.Message):
    __slots__ = ("prefill", "decode", "tokens", "handoff_ms")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    tokens: int
    handoff_ms: float
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., tokens: _Optional[int] = ..., handoff_ms: _Optional[float] = ...) -> None: ...

class KVGroup(_message.Message):
    __slots__ = ("kv", "worker_ids", "engine")
    KV_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    kv: str
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    engine: str
    def __init__(self, kv: _Optional[str] = ..., worker_ids: _Optional[_Iterable[str]] = ..., engine: _Optional[str] = ...) -> None: ...

class PairStatus(_message.Message):
    __slots__ = ("prefill", "decode", "state", "reason", "transport", "bytes_per_s")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    state: PairState
    reason: str
    transport: _types_pb2.Transport
    bytes_per_s: int
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., state: _Optional[_Union[PairState, str]] = ..., reason: _Optional[str] = ..., transport: _Optional[_Union[_types_pb2.Transport, str]] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "state", "load", "load_age_ms", "has_session", "reason", "num_requests")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    HAS_SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerDescription
    state: WorkerState
    load: _types_pb2.LoadSnapshot
    load_age_ms: int
    has_session: bool
    reason: str
    num_requests: int
    def __init__(self, worker: _Optional[_Union[WorkerDescription, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., load: _Optional[_Union[_types_pb2.LoadSnapshot, _Mapping]] = ..., load_age_ms: _Optional[int] = ..., has_session: _Optional[bool] = ..., reason: _Optional[str] = ..., num_requests: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "deadline_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    deadline_ms: int
    def __init__(self, worker_id: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_finished", "num_migrated")
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATED_FIELD_NUMBER: _ClassVar[int]
    num_finished: int
    num_migrated: int
    def __init__(self, num_finished: _Optional[int] = ..., num_migrated: _Optional[int] = ...) -> None: ...

class ListRecentRequestsRequest(_message.Message):
    __slots__ = ("model", "within_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    within_ms: int
    def __init__(self, model: _Optional[str] = ..., within_ms: _Optional[int] = ...) -> None: ...

class ListRecentRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecentRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[RecentRequest, _Mapping]]] = ...) -> None: ...

class RecentRequest(_message.Message):
    __slots__ = ("age_us", "prompt_tokens", "output_tokens", "max_tokens", "priority", "ttft_us", "total_us", "failed")
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    age_us: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int
    ttft_us: int
    total_us: int
    failed: bool
    def __init__(self, age_us: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., ttft_us: _Optional[int] = ..., total_us: _Optional[int] = ..., failed: _Optional[bool] = ...) -> None: ...

class ListTimelinesRequest(_message.Message):
    __slots__ = ("after", "most")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    after: int
    most: int
    def __init__(self, after: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class ListTimelinesResponse(_message.Message):
    __slots__ = ("timelines", "newest", "router_incarnation", "objectives")
    TIMELINES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    timelines: _containers.RepeatedCompositeFieldContainer[Timeline]
    newest: int
    router_incarnation: int
    objectives: Objectives
    def __init__(self, timelines: _Optional[_Iterable[_Union[Timeline, _Mapping]]] = ..., newest: _Optional[int] = ..., router_incarnation: _Optional[int] = ..., objectives: _Optional[_Union[Objectives, _Mapping]] = ...) -> None: ...

class Objectives(_message.Message):
    __slots__ = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    e2e_ms: float
    queue_ms: float
    def __init__(self, ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., itl_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("number", "request_id", "model", "trace_id", "age_us", "phase", "prompt_tokens", "cached_tokens", "output_tokens", "max_tokens", "priority", "ttft_us", "total_us", "tpot_us", "longest_itl_us", "prefill_worker", "decode_worker", "outcome", "failure", "num_retries", "stages", "timings", "prompt", "output")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    TPOT_US_FIELD_NUMBER: _ClassVar[int]
    LONGEST_ITL_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    model: str
    trace_id: str
    age_us: int
    phase: RequestPhase
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int
    ttft_us: int
    total_us: int
    tpot_us: int
    longest_itl_us: int
    prefill_worker: str
    decode_worker: str
    outcome: str
    failure: str
    num_retries: int
    stages: _containers.RepeatedCompositeFieldContainer[TimelineStage]
    timings: _types_pb2.PhaseTimings
    prompt: str
    output: str
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., trace_id: _Optional[str] = ..., age_us: _Optional[int] = ..., phase: _Optional[_Union[RequestPhase, str]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., ttft_us: _Optional[int] = ..., total_us: _Optional[int] = ..., tpot_us: _Optional[int] = ..., longest_itl_us: _Optional[int] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., outcome: _Optional[str] = ..., failure: _Optional[str] = ..., num_retries: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[TimelineStage, _Mapping]]] = ..., timings: _Optional[_Union[_types_pb2.PhaseTimings, _Mapping]] = ..., prompt: _Optional[str] = ..., output: _Optional[str] = ...) -> None: ...

class TimelineStage(_message.Message):
    __slots__ = ("name", "start_us", "end_us", "worker_id", "leg", "attempt", "outcome")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    END_US_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_us: int
    end_us: int
    worker_id: str
    leg: int
    attempt: int
    outcome: str
    def __init__(self, name: _Optional[str] = ..., start_us: _Optional[int] = ..., end_us: _Optional[int] = ..., worker_id: _Optional[str] = ..., leg: _Optional[int] = ..., attempt: _Optional[int] = ..., outcome: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ExplainedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[ExplainedRequest, _Mapping]]] = ...) -> None: ...

class ExplainedRequest(_message.Message):
    __slots__ = ("request_id", "model", "age_us", "live", "choices", "num_forgotten", "waiting", "failure")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    age_us: int
    live: bool
    choices: _containers.RepeatedCompositeFieldContainer[PlacementChoice]
    num_forgotten: int
    waiting: VainAttempt
    failure: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., age_us: _Optional[int] = ..., live: _Optional[bool] = ..., choices: _Optional[_Iterable[_Union[PlacementChoice, _Mapping]]] = ..., num_forgotten: _Optional[int] = ..., waiting: _Optional[_Union[VainAttempt, _Mapping]] = ..., failure: _Optional[str] = ...) -> None: ...

class Unsplit(_message.Message):
    __slots__ = ("reason", "prefill", "costs")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    reason: UnsplitReason
    prefill: str
    costs: SplitCosts
    def __init__(self, reason: _Optional[_Union[UnsplitReason, str]] = ..., prefill: _Optional[str] = ..., costs: _Optional[_Union[SplitCosts, _Mapping]] = ...) -> None: ...

class SplitAfterAll(_message.Message):
    __slots__ = ("reason", "decode", "costs")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    reason: SplitReason
    decode: str
    costs: SplitCosts
    def __init__(self, reason: _Optional[_Union[SplitReason, str]] = ..., decode: _Optional[str] = ..., costs: _Optional[_Union[SplitCosts, _Mapping]] = ...) -> None: ...

class SplitCosts(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "handoff_ms", "unsplit_queue_ms", "unsplit_prefill_ms", "disturbance_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    UNSPLIT_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    UNSPLIT_PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DISTURBANCE_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    handoff_ms: float
    unsplit_queue_ms: float
    unsplit_prefill_ms: float
    disturbance_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., handoff_ms: _Optional[float] = ..., unsplit_queue_ms: _Optional[float] = ..., unsplit_prefill_ms: _Optional[float] = ..., disturbance_ms: _Optional[float] = ...) -> None: ...

class LeftOutWorker(_message.Message):
    __slots__ = ("worker_id", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    reason: LeftOutReason
    def __init__(self, worker_id: _Optional[str] = ..., reason: _Optional[_Union[LeftOutReason, str]] = ...) -> None: ...

class VainAttempt(_message.Message):
    __slots__ = ("phase", "age_us", "left_out", "num_left_out")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    phase: PlacedPhase
    age_us: int
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOutWorker]
    num_left_out: int
    def __init__(self, phase: _Optional[_Union[PlacedPhase, str]] = ..., age_us: _Optional[int] = ..., left_out: _Optional[_Iterable[_Union[LeftOutWorker, _Mapping]]] = ..., num_left_out: _Optional[int] = ...) -> None: ...

class PlacementChoice(_message.Message):
    __slots__ = ("phase", "leg", "attempt", "age_us", "waited_us", "outcome", "terms", "candidates", "num_candidates", "left_out", "num_left_out", "verdict", "before", "unsplit", "split", "prefix")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AGE_US_FIELD_NUMBER: _ClassVar[int]
    WAITED_US_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    UNSPLIT_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    phase: PlacedPhase
    leg: int
    attempt: int
    age_us: int
    waited_us: int
    outcome: str
    terms: _containers.RepeatedCompositeFieldContainer[PlacementTerm]
    candidates: _containers.RepeatedCompositeFieldContainer[PlacementCandidate]
    num_candidates: int
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOutWorker]
    num_left_out: int
    verdict: PlacementVerdict
    before: VainAttempt
    unsplit: Unsplit
    split: SplitAfterAll
    prefix: PrefixFromElsewhere
    def __init__(self, phase: _Optional[_Union[PlacedPhase, str]] = ..., leg: _Optional[int] = ..., attempt: _Optional[int] = ..., age_us: _Optional[int] = ..., waited_us: _Optional[int] = ..., outcome: _Optional[str] = ..., terms: _Optional[_Iterable[_Union[PlacementTerm, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[PlacementCandidate, _Mapping]]] = ..., num_candidates: _Optional[int] = ..., left_out: _Optional[_Iterable[_Union[LeftOutWorker, _Mapping]]] = ..., num_left_out: _Optional[int] = ..., verdict: _Optional[_Union[PlacementVerdict, _Mapping]] = ..., before: _Optional[_Union[VainAttempt, _Mapping]] = ..., unsplit: _Optional[_Union[Unsplit, _Mapping]] = ..., split: _Optional[_Union[SplitAfterAll, _Mapping]] = ..., prefix: _Optional[_Union[PrefixFromElsewhere, _Mapping]] = ...) -> None: ...

class PrefixFromElsewhere(_message.Message):
    __slots__ = ("source", "num_tokens", "bring_ms", "compute_ms", "why_computed", "brought_tokens", "brought_ms")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BRING_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    WHY_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_MS_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_tokens: int
    bring_ms: float
    compute_ms: float
    why_computed: PrefixComputedReason
    brought_tokens: int
    brought_ms: float
    def __init__(self, source: _Optional[str] = ..., num_tokens: _Optional[int] = ..., bring_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., why_computed: _Optional[_Union[PrefixComputedReason, str]] = ..., brought_tokens: _Optional[int] = ..., brought_ms: _Optional[float] = ...) -> None: ...

class PlacementTerm(_message.Message):
    __slots__ = ("name", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class PlacementCandidate(_message.Message):
    __slots__ = ("worker_id", "score", "values")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    score: float
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, worker_id: _Optional[str] = ..., score: _Optional[float] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class PlacementVerdict(_message.Message):
    __slots__ = ("decider", "term", "term_difference", "score_difference", "queue_ms", "step_ms")
    DECIDER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    SCORE_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    decider: Decider
    term: str
    term_difference: float
    score_difference: float
    queue_ms: float
    step_ms: float
    def __init__(self, decider: _Optional[_Union[Decider, str]] = ..., term: _Optional[str] = ..., term_difference: _Optional[float] = ..., score_difference: _Optional[float] = ..., queue_ms: _Optional[float] = ..., step_ms: _Optional[float] = ...) -> None: ...
