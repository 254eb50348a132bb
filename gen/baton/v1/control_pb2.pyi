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

class PairState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAIR_STATE_UNSPECIFIED: _ClassVar[PairState]
    PAIR_STATE_UNPROVEN: _ClassVar[PairState]
    PAIR_STATE_PROVEN: _ClassVar[PairState]
    PAIR_STATE_BROKEN: _ClassVar[PairState]

class PlacedPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACED_PHASE_UNSPECIFIED: _ClassVar[PlacedPhase]
    PLACED_PHASE_PREFILL: _ClassVar[PlacedPhase]
    PLACED_PHASE_DECODE: _ClassVar[PlacedPhase]
    PLACED_PHASE_WHOLE: _ClassVar[PlacedPhase]

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

class UnsplitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSPLIT_REASON_UNSPECIFIED: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_NEVER: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_QUEUE: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_PREFIX: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_HANDOFF: _ClassVar[UnsplitReason]
    UNSPLIT_REASON_SPEED: _ClassVar[UnsplitReason]

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
PAIR_STATE_UNSPECIFIED: PairState
PAIR_STATE_UNPROVEN: PairState
PAIR_STATE_PROVEN: PairState
PAIR_STATE_BROKEN: PairState
PLACED_PHASE_UNSPECIFIED: PlacedPhase
PLACED_PHASE_PREFILL: PlacedPhase
PLACED_PHASE_DECODE: PlacedPhase
PLACED_PHASE_WHOLE: PlacedPhase
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
UNSPLIT_REASON_UNSPECIFIED: UnsplitReason
UNSPLIT_REASON_NEVER: UnsplitReason
UNSPLIT_REASON_QUEUE: UnsplitReason
UNSPLIT_REASON_PREFIX: UnsplitReason
UNSPLIT_REASON_HANDOFF: UnsplitReason
UNSPLIT_REASON_SPEED: UnsplitReason
DECIDER_UNSPECIFIED: Decider
DECIDER_TERM: Decider
DECIDER_TIE: Decider
DECIDER_ONLY: Decider
DECIDER_AGED: Decider

class WorkerDescription(_message.Message):
    __slots__ = ("worker_id", "roles", "address", "incarnation", "pid", "layout", "num_blocks", "max_model_len", "max_num_seqs", "host_id", "vocab_size", "device", "fingerprint", "kernels", "capacity")
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
    def __init__(self, worker_id: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[_types_pb2.WorkerRole, str]]] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.KVLayout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., host_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., device: _Optional[str] = ..., fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., kernels: _Optional[str] = ..., capacity: _Optional[float] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerDescription
    def __init__(self, worker: _Optional[_Union[WorkerDescription, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("router_incarnation", "router_pid", "ready", "workers", "num_queued", "num_prefilling", "num_parked", "num_decoding", "models", "pairs", "http_port")
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
    def __init__(self, router_incarnation: _Optional[int] = ..., router_pid: _Optional[int] = ..., ready: _Optional[bool] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., num_queued: _Optional[int] = ..., num_prefilling: _Optional[int] = ..., num_parked: _Optional[int] = ..., num_decoding: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ..., http_port: _Optional[int] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model_id", "ready", "context_tokens", "num_workers", "num_queued", "num_live", "kv_groups", "split_break_even", "policy")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_BREAK_EVEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    ready: bool
    context_tokens: int
    num_workers: int
    num_queued: int
    num_live: int
    kv_groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    split_break_even: SplitBreakEven
    policy: str
    def __init__(self, model_id: _Optional[str] = ..., ready: _Optional[bool] = ..., context_tokens: _Optional[int] = ..., num_workers: _Optional[int] = ..., num_queued: _Optional[int] = ..., num_live: _Optional[int] = ..., kv_groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ..., split_break_even: _Optional[_Union[SplitBreakEven, _Mapping]] = ..., policy: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("kv", "worker_ids")
    KV_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    kv: str
    worker_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kv: _Optional[str] = ..., worker_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class PairStatus(_message.Message):
    __slots__ = ("prefill", "decode", "state", "reason", "transport")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    prefill: str
    decode: str
    state: PairState
    reason: str
    transport: _types_pb2.Transport
    def __init__(self, prefill: _Optional[str] = ..., decode: _Optional[str] = ..., state: _Optional[_Union[PairState, str]] = ..., reason: _Optional[str] = ..., transport: _Optional[_Union[_types_pb2.Transport, str]] = ...) -> None: ...

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

class SplitCosts(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "handoff_ms", "whole_queue_ms", "whole_prefill_ms", "disturbance_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DISTURBANCE_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    handoff_ms: float
    whole_queue_ms: float
    whole_prefill_ms: float
    disturbance_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., handoff_ms: _Optional[float] = ..., whole_queue_ms: _Optional[float] = ..., whole_prefill_ms: _Optional[float] = ..., disturbance_ms: _Optional[float] = ...) -> None: ...

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
    __slots__ = ("phase", "leg", "attempt", "age_us", "waited_us", "outcome", "terms", "candidates", "num_candidates", "left_out", "num_left_out", "verdict", "before", "unsplit")
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
    def __init__(self, phase: _Optional[_Union[PlacedPhase, str]] = ..., leg: _Optional[int] = ..., attempt: _Optional[int] = ..., age_us: _Optional[int] = ..., waited_us: _Optional[int] = ..., outcome: _Optional[str] = ..., terms: _Optional[_Iterable[_Union[PlacementTerm, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[PlacementCandidate, _Mapping]]] = ..., num_candidates: _Optional[int] = ..., left_out: _Optional[_Iterable[_Union[LeftOutWorker, _Mapping]]] = ..., num_left_out: _Optional[int] = ..., verdict: _Optional[_Union[PlacementVerdict, _Mapping]] = ..., before: _Optional[_Union[VainAttempt, _Mapping]] = ..., unsplit: _Optional[_Union[Unsplit, _Mapping]] = ...) -> None: ...

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
