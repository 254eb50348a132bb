from baton.v1 import control_pb2 as _control_pb2
from baton.v1 import types_pb2 as _types_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseEndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_END_REASON_UNSPECIFIED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_RELEASED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_EXPIRED: _ClassVar[LeaseEndReason]
    LEASE_END_REASON_ABORTED: _ClassVar[LeaseEndReason]
LEASE_END_REASON_UNSPECIFIED: LeaseEndReason
LEASE_END_REASON_RELEASED: LeaseEndReason
LEASE_END_REASON_EXPIRED: LeaseEndReason
LEASE_END_REASON_ABORTED: LeaseEndReason

class GetModelTextRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelTextResponse(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "prefill", "decode", "cancel", "heartbeat", "leave", "park")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    PARK_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    prefill: PrefillCommand
    decode: DecodeCommand
    cancel: CancelLeg
    heartbeat: RouterHeartbeat
    leave: LeaveCommand
    park: ParkCommand
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., prefill: _Optional[_Union[PrefillCommand, _Mapping]] = ..., decode: _Optional[_Union[DecodeCommand, _Mapping]] = ..., cancel: _Optional[_Union[CancelLeg, _Mapping]] = ..., heartbeat: _Optional[_Union[RouterHeartbeat, _Mapping]] = ..., leave: _Optional[_Union[LeaveCommand, _Mapping]] = ..., park: _Optional[_Union[ParkCommand, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("events", "load", "live_legs", "worker", "cache", "num_routers", "verdicts")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LIVE_LEGS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[LegEvent]
    load: _types_pb2.LoadSnapshot
    live_legs: LiveLegs
    worker: _control_pb2.WorkerDescription
    cache: CacheEvents
    num_routers: int
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    def __init__(self, events: _Optional[_Iterable[_Union[LegEvent, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.LoadSnapshot, _Mapping]] = ..., live_legs: _Optional[_Union[LiveLegs, _Mapping]] = ..., worker: _Optional[_Union[_control_pb2.WorkerDescription, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ..., num_routers: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("number", "whole", "stored", "removed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    number: int
    whole: bool
    stored: bytes
    removed: bytes
    def __init__(self, number: _Optional[int] = ..., whole: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class LegEvent(_message.Message):
    __slots__ = ("started", "lease_ended", "admitted", "refused", "ready", "import_failed", "tokens", "failed", "prompt_tokens", "parked", "prefix_brought", "prompt_computed")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_ENDED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IMPORT_FAILED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BROUGHT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    lease_ended: LeaseEnded
    admitted: DecodeAdmitted
    refused: DecodeRefused
    ready: ImportReady
    import_failed: ImportFailed
    tokens: _types_pb2.SequenceTokens
    failed: LegFailed
    prompt_tokens: PromptTokens
    parked: Parked
    prefix_brought: PrefixBrought
    prompt_computed: PromptComputed
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., lease_ended: _Optional[_Union[LeaseEnded, _Mapping]] = ..., admitted: _Optional[_Union[DecodeAdmitted, _Mapping]] = ..., refused: _Optional[_Union[DecodeRefused, _Mapping]] = ..., ready: _Optional[_Union[ImportReady, _Mapping]] = ..., import_failed: _Optional[_Union[ImportFailed, _Mapping]] = ..., tokens: _Optional[_Union[_types_pb2.SequenceTokens, _Mapping]] = ..., failed: _Optional[_Union[LegFailed, _Mapping]] = ..., prompt_tokens: _Optional[_Union[PromptTokens, _Mapping]] = ..., parked: _Optional[_Union[Parked, _Mapping]] = ..., prefix_brought: _Optional[_Union[PrefixBrought, _Mapping]] = ..., prompt_computed: _Optional[_Union[PromptComputed, _Mapping]] = ...) -> None: ...

class PromptComputed(_message.Message):
    __slots__ = ("leg", "num_tokens")
    LEG_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    num_tokens: int
    def __init__(self, leg: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PrefixBrought(_message.Message):
    __slots__ = ("leg", "num_tokens", "num_bytes", "ms")
    LEG_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    num_tokens: int
    num_bytes: int
    ms: float
    def __init__(self, leg: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., ms: _Optional[float] = ...) -> None: ...

class PromptTokens(_message.Message):
    __slots__ = ("leg", "position", "logprobs")
    LEG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    def __init__(self, leg: _Optional[int] = ..., position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("router_incarnation", "session_number", "worker_incarnation", "follows_cache")
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_CACHE_FIELD_NUMBER: _ClassVar[int]
    router_incarnation: int
    session_number: int
    worker_incarnation: int
    follows_cache: bool
    def __init__(self, router_incarnation: _Optional[int] = ..., session_number: _Optional[int] = ..., worker_incarnation: _Optional[int] = ..., follows_cache: _Optional[bool] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("leg", "request_id", "token_ids", "output_base", "sampling", "stopping", "logprobs", "priority", "cache_salt", "remaining_ms", "traceparent", "constraint", "n", "prompt_logprobs", "prefix_source", "keep_at")
    LEG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BASE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    KEEP_AT_FIELD_NUMBER: _ClassVar[int]
    leg: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_base: int
    sampling: _types_pb2.SamplingParams
    stopping: _types_pb2.StoppingParams
    logprobs: int
    priority: int
    cache_salt: str
    remaining_ms: int
    traceparent: str
    constraint: _types_pb2.Constraint
    n: int
    prompt_logprobs: int
    prefix_source: _types_pb2.KVSource
    keep_at: _types_pb2.KVSource
    def __init__(self, leg: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., output_base: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., remaining_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., constraint: _Optional[_Union[_types_pb2.Constraint, _Mapping]] = ..., n: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., prefix_source: _Optional[_Union[_types_pb2.KVSource, _Mapping]] = ..., keep_at: _Optional[_Union[_types_pb2.KVSource, _Mapping]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("leg", "request_id", "token_ids", "output_base", "sampling", "stopping", "logprobs", "priority", "cache_salt", "remaining_ms", "traceparent", "handoff", "age_ms", "constraint", "n", "prompt_logprobs", "prefix_source", "keep_at")
    LEG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BASE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCE_FIELD_NUMBER: _ClassVar[int]
    KEEP_AT_FIELD_NUMBER: _ClassVar[int]
    leg: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_base: int
    sampling: _types_pb2.SamplingParams
    stopping: _types_pb2.StoppingParams
    logprobs: int
    priority: int
    cache_salt: str
    remaining_ms: int
    traceparent: str
    handoff: Handoff
    age_ms: int
    constraint: _types_pb2.Constraint
    n: int
    prompt_logprobs: int
    prefix_source: _types_pb2.KVSource
    keep_at: _types_pb2.KVSource
    def __init__(self, leg: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., output_base: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., remaining_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ..., age_ms: _Optional[int] = ..., constraint: _Optional[_Union[_types_pb2.Constraint, _Mapping]] = ..., n: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., prefix_source: _Optional[_Union[_types_pb2.KVSource, _Mapping]] = ..., keep_at: _Optional[_Union[_types_pb2.KVSource, _Mapping]] = ...) -> None: ...

class ParkCommand(_message.Message):
    __slots__ = ("leg", "request_id", "handoff", "num_tokens", "n", "output_base", "age_ms", "remaining_ms", "traceparent")
    LEG_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BASE_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    leg: int
    request_id: str
    handoff: Handoff
    num_tokens: int
    n: int
    output_base: int
    age_ms: int
    remaining_ms: int
    traceparent: str
    def __init__(self, leg: _Optional[int] = ..., request_id: _Optional[str] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ..., num_tokens: _Optional[int] = ..., n: _Optional[int] = ..., output_base: _Optional[int] = ..., age_ms: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Parked(_message.Message):
    __slots__ = ("leg", "lease_id", "source")
    LEG_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    leg: int
    lease_id: bytes
    source: _types_pb2.KVSource
    def __init__(self, leg: _Optional[int] = ..., lease_id: _Optional[bytes] = ..., source: _Optional[_Union[_types_pb2.KVSource, _Mapping]] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("lease_id", "source")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    source: _types_pb2.KVSource
    def __init__(self, lease_id: _Optional[bytes] = ..., source: _Optional[_Union[_types_pb2.KVSource, _Mapping]] = ...) -> None: ...

class CancelLeg(_message.Message):
    __slots__ = ("leg", "index")
    LEG_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    leg: int
    index: int
    def __init__(self, leg: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class RouterHeartbeat(_message.Message):
    __slots__ = ("held_leases", "verdicts")
    HELD_LEASES_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    held_leases: _containers.RepeatedScalarFieldContainer[bytes]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    def __init__(self, held_leases: _Optional[_Iterable[bytes]] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("incarnation", "number")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    number: int
    def __init__(self, incarnation: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class LeaveCommand(_message.Message):
    __slots__ = ("remaining_ms",)
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    remaining_ms: int
    def __init__(self, remaining_ms: _Optional[int] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("leg", "lease_id", "source", "cached_tokens")
    LEG_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    lease_id: bytes
    source: _types_pb2.KVSource
    cached_tokens: int
    def __init__(self, leg: _Optional[int] = ..., lease_id: _Optional[bytes] = ..., source: _Optional[_Union[_types_pb2.KVSource, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class LeaseEnded(_message.Message):
    __slots__ = ("leg", "reason")
    LEG_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    leg: int
    reason: LeaseEndReason
    def __init__(self, leg: _Optional[int] = ..., reason: _Optional[_Union[LeaseEndReason, str]] = ...) -> None: ...

class DecodeAdmitted(_message.Message):
    __slots__ = ("leg", "cached_tokens")
    LEG_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    cached_tokens: int
    def __init__(self, leg: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class DecodeRefused(_message.Message):
    __slots__ = ("leg", "needed_blocks", "missing_blocks")
    LEG_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    needed_blocks: int
    missing_blocks: int
    def __init__(self, leg: _Optional[int] = ..., needed_blocks: _Optional[int] = ..., missing_blocks: _Optional[int] = ...) -> None: ...

class ImportReady(_message.Message):
    __slots__ = ("leg", "transport", "num_bytes", "copy_ms")
    LEG_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_MS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    transport: _types_pb2.Transport
    num_bytes: int
    copy_ms: float
    def __init__(self, leg: _Optional[int] = ..., transport: _Optional[_Union[_types_pb2.Transport, str]] = ..., num_bytes: _Optional[int] = ..., copy_ms: _Optional[float] = ...) -> None: ...

class ImportFailed(_message.Message):
    __slots__ = ("leg", "lease_alive", "status")
    LEG_FIELD_NUMBER: _ClassVar[int]
    LEASE_ALIVE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    lease_alive: bool
    status: _status_pb2.Status
    def __init__(self, leg: _Optional[int] = ..., lease_alive: _Optional[bool] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class LegFailed(_message.Message):
    __slots__ = ("leg", "status")
    LEG_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    status: _status_pb2.Status
    def __init__(self, leg: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class LiveLegs(_message.Message):
    __slots__ = ("newest_leg", "legs")
    NEWEST_LEG_FIELD_NUMBER: _ClassVar[int]
    LEGS_FIELD_NUMBER: _ClassVar[int]
    newest_leg: int
    legs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, newest_leg: _Optional[int] = ..., legs: _Optional[_Iterable[int]] = ...) -> None: ...
