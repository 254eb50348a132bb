from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_STORE: _ClassVar[WorkerRole]

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_SHM: _ClassVar[Transport]
    TRANSPORT_GRPC: _ClassVar[Transport]
    TRANSPORT_LOCAL: _ClassVar[Transport]
    TRANSPORT_TCP: _ClassVar[Transport]
    TRANSPORT_NIXL: _ClassVar[Transport]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_STORE: WorkerRole
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_SHM: Transport
TRANSPORT_GRPC: Transport
TRANSPORT_LOCAL: Transport
TRANSPORT_TCP: Transport
TRANSPORT_NIXL: Transport
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "allowed_token_ids", "bad_token_ids", "bad_words")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    seed: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_token_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., seed: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_token_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class StoppingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar", "choices")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: AnyJsonObject
    regex: str
    grammar: str
    choices: Choices
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[_Union[AnyJsonObject, _Mapping]] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class AnyJsonObject(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., rank: _Optional[int] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("model_id", "weights_digest", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_size", "layout_version", "config_digest", "engine")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    weights_digest: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    layout_version: int
    config_digest: str
    engine: str
    def __init__(self, model_id: _Optional[str] = ..., weights_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., layout_version: _Optional[int] = ..., config_digest: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("kv", "numerics")
    KV_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    kv: str
    numerics: str
    def __init__(self, kv: _Optional[str] = ..., numerics: _Optional[str] = ...) -> None: ...

class KVSource(_message.Message):
    __slots__ = ("address", "incarnation", "offers", "layout")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: int
    offers: _containers.RepeatedCompositeFieldContainer[KVOffer]
    layout: KVLayout
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[KVOffer, _Mapping]]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ...) -> None: ...

class KVOffer(_message.Message):
    __slots__ = ("transport", "shm_socket", "tcp_address", "nixl_metadata", "shards", "tcp_tls")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SHM_SOCKET_FIELD_NUMBER: _ClassVar[int]
    TCP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TCP_TLS_FIELD_NUMBER: _ClassVar[int]
    transport: Transport
    shm_socket: str
    tcp_address: str
    nixl_metadata: bytes
    shards: _containers.RepeatedCompositeFieldContainer[KVShard]
    tcp_tls: bool
    def __init__(self, transport: _Optional[_Union[Transport, str]] = ..., shm_socket: _Optional[str] = ..., tcp_address: _Optional[str] = ..., nixl_metadata: _Optional[bytes] = ..., shards: _Optional[_Iterable[_Union[KVShard, _Mapping]]] = ..., tcp_tls: _Optional[bool] = ...) -> None: ...

class KVShard(_message.Message):
    __slots__ = ("first_layer", "num_layers", "first_kv_head", "num_kv_heads")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    num_layers: int
    first_kv_head: int
    num_kv_heads: int
    def __init__(self, first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_kv_head: _Optional[int] = ..., num_kv_heads: _Optional[int] = ...) -> None: ...

class LoadSnapshot(_message.Message):
    __slots__ = ("sequence_number", "blocks_importing", "blocks_leased", "blocks_active", "blocks_cached", "blocks_free", "num_running", "num_waiting", "queued_prefill_tokens", "num_importing", "num_leases", "num_preemptions", "ms_per_prefill_token", "ms_per_decode_step", "current_step_ms", "prefix_tokens_queried", "prefix_tokens_hit", "draining", "consecutive_step_failures", "ms_per_decode_sequence", "tokens_per_prefill_step", "prefill_step", "decode_step", "ms_per_further_prefill_token", "num_tokens")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IMPORTING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LEASED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_IMPORTING_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MS_PER_PREFILL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MS_PER_DECODE_STEP_FIELD_NUMBER: _ClassVar[int]
    CURRENT_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_QUERIED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_HIT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CONSECUTIVE_STEP_FAILURES_FIELD_NUMBER: _ClassVar[int]
    MS_PER_DECODE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_PREFILL_STEP_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEP_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_FIELD_NUMBER: _ClassVar[int]
    MS_PER_FURTHER_PREFILL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    blocks_importing: int
    blocks_leased: int
    blocks_active: int
    blocks_cached: int
    blocks_free: int
    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    num_importing: int
    num_leases: int
    num_preemptions: int
    ms_per_prefill_token: float
    ms_per_decode_step: float
    current_step_ms: float
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    draining: bool
    consecutive_step_failures: int
    ms_per_decode_sequence: float
    tokens_per_prefill_step: float
    prefill_step: StepAverage
    decode_step: StepAverage
    ms_per_further_prefill_token: float
    num_tokens: int
    def __init__(self, sequence_number: _Optional[int] = ..., blocks_importing: _Optional[int] = ..., blocks_leased: _Optional[int] = ..., blocks_active: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_free: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., num_importing: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., ms_per_prefill_token: _Optional[float] = ..., ms_per_decode_step: _Optional[float] = ..., current_step_ms: _Optional[float] = ..., prefix_tokens_queried: _Optional[int] = ..., prefix_tokens_hit: _Optional[int] = ..., draining: _Optional[bool] = ..., consecutive_step_failures: _Optional[int] = ..., ms_per_decode_sequence: _Optional[float] = ..., tokens_per_prefill_step: _Optional[float] = ..., prefill_step: _Optional[_Union[StepAverage, _Mapping]] = ..., decode_step: _Optional[_Union[StepAverage, _Mapping]] = ..., ms_per_further_prefill_token: _Optional[float] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class StepAverage(_message.Message):
    __slots__ = ("ms", "tokens", "attended_tokens", "num_steps")
    MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    ms: float
    tokens: float
    attended_tokens: float
    num_steps: int
    def __init__(self, ms: _Optional[float] = ..., tokens: _Optional[float] = ..., attended_tokens: _Optional[float] = ..., num_steps: _Optional[int] = ...) -> None: ...

class SequenceTokens(_message.Message):
    __slots__ = ("leg", "position", "token_ids", "logprobs", "finish", "timings", "index")
    LEG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    leg: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish: SequenceFinish
    timings: PhaseTimings
    index: int
    def __init__(self, leg: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[SequenceFinish, _Mapping]] = ..., timings: _Optional[_Union[PhaseTimings, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class SequenceFinish(_message.Message):
    __slots__ = ("reason", "stop_token_id", "timings")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    timings: PhaseTimings
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., timings: _Optional[_Union[PhaseTimings, _Mapping]] = ...) -> None: ...

class PhaseTimings(_message.Message):
    __slots__ = ("tokenize_ms", "queue_ms", "prefill_wait_ms", "prefill_compute_ms", "transfer_ms", "transfer_overlapped_ms", "transfer_exposed_ms", "decode_wait_ms", "decode_run_ms", "ttft_ms", "total_ms", "transfer_bytes", "transfer_blocks", "transport")
    TOKENIZE_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_OVERLAPPED_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_RUN_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    tokenize_ms: float
    queue_ms: float
    prefill_wait_ms: float
    prefill_compute_ms: float
    transfer_ms: float
    transfer_overlapped_ms: float
    transfer_exposed_ms: float
    decode_wait_ms: float
    decode_run_ms: float
    ttft_ms: float
    total_ms: float
    transfer_bytes: int
    transfer_blocks: int
    transport: Transport
    def __init__(self, tokenize_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., prefill_wait_ms: _Optional[float] = ..., prefill_compute_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., transfer_overlapped_ms: _Optional[float] = ..., transfer_exposed_ms: _Optional[float] = ..., decode_wait_ms: _Optional[float] = ..., decode_run_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., transfer_blocks: _Optional[int] = ..., transport: _Optional[_Union[Transport, str]] = ...) -> None: ...
