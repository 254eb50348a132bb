from baton.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LendRequest(_message.Message):
    __slots__ = ("source_incarnation", "layout", "hashes")
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    source_incarnation: int
    layout: _types_pb2.KVLayout
    hashes: bytes
    def __init__(self, source_incarnation: _Optional[int] = ..., layout: _Optional[_Union[_types_pb2.KVLayout, _Mapping]] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class LendResponse(_message.Message):
    __slots__ = ("num_blocks", "lease_id", "offers")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    lease_id: bytes
    offers: _containers.RepeatedCompositeFieldContainer[_types_pb2.KVOffer]
    def __init__(self, num_blocks: _Optional[int] = ..., lease_id: _Optional[bytes] = ..., offers: _Optional[_Iterable[_Union[_types_pb2.KVOffer, _Mapping]]] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("source", "hashes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    source: _types_pb2.KVSource
    hashes: bytes
    def __init__(self, source: _Optional[_Union[_types_pb2.KVSource, _Mapping]] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class KeepResponse(_message.Message):
    __slots__ = ("num_wanted",)
    NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    num_wanted: int
    def __init__(self, num_wanted: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("open", "ack")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    open: FetchOpen
    ack: FetchAck
    def __init__(self, open: _Optional[_Union[FetchOpen, _Mapping]] = ..., ack: _Optional[_Union[FetchAck, _Mapping]] = ...) -> None: ...

class FetchOpen(_message.Message):
    __slots__ = ("lease_id", "leg", "first_block", "transport", "layout", "source_incarnation", "checksums")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    leg: int
    first_block: int
    transport: _types_pb2.Transport
    layout: _types_pb2.KVLayout
    source_incarnation: int
    checksums: bool
    def __init__(self, lease_id: _Optional[bytes] = ..., leg: _Optional[int] = ..., first_block: _Optional[int] = ..., transport: _Optional[_Union[_types_pb2.Transport, str]] = ..., layout: _Optional[_Union[_types_pb2.KVLayout, _Mapping]] = ..., source_incarnation: _Optional[int] = ..., checksums: _Optional[bool] = ...) -> None: ...

class FetchAck(_message.Message):
    __slots__ = ("copied_blocks",)
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    copied_blocks: int
    def __init__(self, copied_blocks: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("blocks", "sealed", "alive")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    blocks: FetchBlocks
    sealed: FetchSealed
    alive: FetchAlive
    def __init__(self, blocks: _Optional[_Union[FetchBlocks, _Mapping]] = ..., sealed: _Optional[_Union[FetchSealed, _Mapping]] = ..., alive: _Optional[_Union[FetchAlive, _Mapping]] = ...) -> None: ...

class FetchAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchBlocks(_message.Message):
    __slots__ = ("first_block", "pool_blocks", "data", "checksums", "num_blocks", "more_follow")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MORE_FOLLOW_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    pool_blocks: _containers.RepeatedScalarFieldContainer[int]
    data: _containers.RepeatedScalarFieldContainer[bytes]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    num_blocks: int
    more_follow: bool
    def __init__(self, first_block: _Optional[int] = ..., pool_blocks: _Optional[_Iterable[int]] = ..., data: _Optional[_Iterable[bytes]] = ..., checksums: _Optional[_Iterable[int]] = ..., num_blocks: _Optional[int] = ..., more_follow: _Optional[bool] = ...) -> None: ...

class FetchSealed(_message.Message):
    __slots__ = ("num_tokens", "first_token", "other_first_tokens")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    first_token: _types_pb2.SequenceTokens
    other_first_tokens: _containers.RepeatedCompositeFieldContainer[_types_pb2.SequenceTokens]
    def __init__(self, num_tokens: _Optional[int] = ..., first_token: _Optional[_Union[_types_pb2.SequenceTokens, _Mapping]] = ..., other_first_tokens: _Optional[_Iterable[_Union[_types_pb2.SequenceTokens, _Mapping]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "leg")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    leg: int
    def __init__(self, lease_id: _Optional[bytes] = ..., leg: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("valid", "reason")
    VALID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    reason: str
    def __init__(self, valid: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...
