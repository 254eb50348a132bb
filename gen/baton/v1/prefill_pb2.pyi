from baton.v1 import types_pb2 as _types_pb2
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

class PrefillServiceSessionRequest(_message.Message):
    __slots__ = ("hello", "prefill", "cancel", "heartbeat", "leave")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.SessionHello
    prefill: PrefillCommand
    cancel: CancelPrefill
    heartbeat: _types_pb2.RouterHeartbeat
    leave: _types_pb2.LeaveCommand
    def __init__(self, hello: _Optional[_Union[_types_pb2.SessionHello, _Mapping]] = ..., prefill: _Optional[_Union[PrefillCommand, _Mapping]] = ..., cancel: _Optional[_Union[CancelPrefill, _Mapping]] = ..., heartbeat: _Optional[_Union[_types_pb2.RouterHeartbeat, _Mapping]] = ..., leave: _Optional[_Union[_types_pb2.LeaveCommand, _Mapping]] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("leg", "request_id", "token_ids", "output_base", "sampling", "stopping", "logprobs", "priority", "cache_salt", "remaining_ms", "traceparent")
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
    def __init__(self, leg: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., output_base: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., remaining_ms: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class CancelPrefill(_message.Message):
    __slots__ = ("leg",)
    LEG_FIELD_NUMBER: _ClassVar[int]
    leg: int
    def __init__(self, leg: _Optional[int] = ...) -> None: ...

class PrefillServiceSessionResponse(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PrefillEvent]
    load: _types_pb2.LoadSnapshot
    def __init__(self, events: _Optional[_Iterable[_Union[PrefillEvent, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.LoadSnapshot, _Mapping]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("started", "tokens", "failed", "lease_ended")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LEASE_ENDED_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    tokens: _types_pb2.SequenceTokens
    failed: _types_pb2.LegFailed
    lease_ended: LeaseEnded
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., tokens: _Optional[_Union[_types_pb2.SequenceTokens, _Mapping]] = ..., failed: _Optional[_Union[_types_pb2.LegFailed, _Mapping]] = ..., lease_ended: _Optional[_Union[LeaseEnded, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("leg", "lease_id", "reason")
    LEG_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    leg: int
    lease_id: bytes
    reason: LeaseEndReason
    def __init__(self, leg: _Optional[int] = ..., lease_id: _Optional[bytes] = ..., reason: _Optional[_Union[LeaseEndReason, str]] = ...) -> None: ...
