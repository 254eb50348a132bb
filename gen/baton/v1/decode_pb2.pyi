from baton.v1 import types_pb2 as _types_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeServiceSessionRequest(_message.Message):
    __slots__ = ("hello", "decode", "cancel", "heartbeat", "leave")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.SessionHello
    decode: DecodeCommand
    cancel: CancelDecode
    heartbeat: _types_pb2.RouterHeartbeat
    leave: _types_pb2.LeaveCommand
    def __init__(self, hello: _Optional[_Union[_types_pb2.SessionHello, _Mapping]] = ..., decode: _Optional[_Union[DecodeCommand, _Mapping]] = ..., cancel: _Optional[_Union[CancelDecode, _Mapping]] = ..., heartbeat: _Optional[_Union[_types_pb2.RouterHeartbeat, _Mapping]] = ..., leave: _Optional[_Union[_types_pb2.LeaveCommand, _Mapping]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("leg", "request_id", "token_ids", "output_base", "sampling", "stopping", "logprobs", "priority", "cache_salt", "remaining_ms", "traceparent", "handoff", "age_ms")
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
    def __init__(self, leg: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., output_base: _Optional[int] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.StoppingParams, _Mapping]] = ..., logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., remaining_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ..., age_ms: _Optional[int] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("lease_id", "source")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    source: _types_pb2.KVSource
    def __init__(self, lease_id: _Optional[bytes] = ..., source: _Optional[_Union[_types_pb2.KVSource, _Mapping]] = ...) -> None: ...

class CancelDecode(_message.Message):
    __slots__ = ("leg",)
    LEG_FIELD_NUMBER: _ClassVar[int]
    leg: int
    def __init__(self, leg: _Optional[int] = ...) -> None: ...

class DecodeServiceSessionResponse(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    load: _types_pb2.LoadSnapshot
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.LoadSnapshot, _Mapping]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("admitted", "refused", "ready", "import_failed", "tokens", "failed")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IMPORT_FAILED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    admitted: DecodeAdmitted
    refused: DecodeRefused
    ready: ImportReady
    import_failed: ImportFailed
    tokens: _types_pb2.SequenceTokens
    failed: _types_pb2.LegFailed
    def __init__(self, admitted: _Optional[_Union[DecodeAdmitted, _Mapping]] = ..., refused: _Optional[_Union[DecodeRefused, _Mapping]] = ..., ready: _Optional[_Union[ImportReady, _Mapping]] = ..., import_failed: _Optional[_Union[ImportFailed, _Mapping]] = ..., tokens: _Optional[_Union[_types_pb2.SequenceTokens, _Mapping]] = ..., failed: _Optional[_Union[_types_pb2.LegFailed, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("leg",)
    LEG_FIELD_NUMBER: _ClassVar[int]
    leg: int
    def __init__(self, leg: _Optional[int] = ...) -> None: ...

class ImportFailed(_message.Message):
    __slots__ = ("leg", "lease_alive", "status")
    LEG_FIELD_NUMBER: _ClassVar[int]
    LEASE_ALIVE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    leg: int
    lease_alive: bool
    status: _status_pb2.Status
    def __init__(self, leg: _Optional[int] = ..., lease_alive: _Optional[bool] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...
