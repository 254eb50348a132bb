"""Every span, attribute, event and metric name, in one place, so that processes, dashboards and `baton trace` agree.

Owns names and nothing else. `gen_ai.*` follow the OpenTelemetry GenAI semantic conventions; `baton.*` are ours.
Units stand in our names; durations of the GenAI metrics are seconds.
"""

from __future__ import annotations


class Span:
    """Span names (DESIGN §9). The router's: the first five and DECODE. A dot says: child of the part before it."""

    REQUEST = "baton.request"
    TOKENIZE = "tokenize"
    QUEUE = "queue"
    PLACE = "place"
    PREFILL = "prefill"
    # Prefill worker: from the command's arrival to admission, and from there to the sampled token.
    PREFILL_WAIT = "prefill.wait"
    PREFILL_COMPUTE = "prefill.compute"
    # Decode worker: from the first block announced to a valid Release.
    KV_TRANSFER = "kv.transfer"
    DECODE = "decode"
    # Decode worker: from the import READY to the first step that has the sequence, and from there to its end.
    DECODE_WAIT = "decode.wait"
    DECODE_RUN = "decode.run"


class Event:
    # On the root, when the first token leaves the router.
    FIRST_TOKEN = "first_token"
    # On the root: a leg was given up and the request placed again.
    RETRY = "retry"
    # On prefill.compute, one per chunk.
    CHUNK = "chunk"
    # On kv.transfer: SEALED received; what follows is exposed.
    SEALED = "sealed"
    # On decode.run: the worker took the sequence's blocks for others.
    PREEMPTED = "preempted"


class Attr:
    # Resource and RPC.
    ERROR_TYPE = "error.type"
    # GenAI: on the root.
    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    REQUEST_TOP_K = "gen_ai.request.top_k"
    REQUEST_SEED = "gen_ai.request.seed"
    REQUEST_STREAM = "gen_ai.request.stream"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    # Seconds.
    TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    CONVERSATION_ID = "gen_ai.conversation.id"
    # On every span.
    REQUEST_ID = "baton.request_id"
    # On what belongs to one leg, and on the workers' spans.
    LEG = "baton.leg"
    ATTEMPT = "baton.attempt"
    # How the router's stage ended: "done", "lost", "cancelled", ...
    OUTCOME = "baton.outcome"
    WORKER = "baton.worker"
    PREFILL_WORKER = "baton.prefill.worker"
    DECODE_WORKER = "baton.decode.worker"
    # On the root.
    TTFT_MS = "baton.ttft_ms"
    RETRIES = "baton.retries"
    PRIORITY = "baton.priority"
    # On place: decode workers that said no.
    NUM_REFUSALS = "baton.place.num_refusals"
    # On prefill.compute, and on its chunk events.
    NUM_TOKENS = "baton.num_tokens"
    CACHED_TOKENS = "baton.cached_tokens"
    NUM_CHUNKS = "baton.prefill.num_chunks"
    # On kv.transfer.
    TRANSFER_BYTES = "baton.transfer.bytes"
    TRANSFER_BLOCKS = "baton.transfer.blocks"
    # "shm", "grpc" or "local".
    TRANSFER_TRANSPORT = "baton.transfer.transport"
    TRANSFER_OVERLAPPED_MS = "baton.transfer.overlapped_ms"
    TRANSFER_EXPOSED_MS = "baton.transfer.exposed_ms"
    LEASE_ID = "baton.lease_id"
    # On decode.run.
    NUM_STEPS = "baton.decode.num_steps"
    MEAN_BATCH_SIZE = "baton.decode.mean_batch_size"
    FIRST_STEP_MS = "baton.decode.first_step_ms"
    INTER_TOKEN_P50_MS = "baton.decode.inter_token_p50_ms"
    INTER_TOKEN_P99_MS = "baton.decode.inter_token_p99_ms"
    INTER_TOKEN_MAX_MS = "baton.decode.inter_token_max_ms"
    NUM_PREEMPTIONS = "baton.decode.num_preemptions"


class Metric:
    """Prometheus names. Counters get `_total` from the client library."""

    # OpenTelemetry GenAI server metrics, in the Prometheus spelling; histograms, seconds.
    REQUEST_DURATION = "gen_ai_server_request_duration_seconds"
    TIME_TO_FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
    TIME_PER_OUTPUT_TOKEN = "gen_ai_server_time_per_output_token_seconds"
    # Router.
    REQUESTS = "baton_requests"
    REQUESTS_LIVE = "baton_requests_live"
    PROMPT_TOKENS = "baton_prompt_tokens"
    OUTPUT_TOKENS = "baton_output_tokens"
    INTER_TOKEN_SECONDS = "baton_inter_token_seconds"
    PHASE_SECONDS = "baton_phase_seconds"
    QUEUE_SECONDS = "baton_queue_seconds"
    QUEUE_LIMIT = "baton_queue_limit"
    RETRIES = "baton_retries"
    SLO_REQUESTS = "baton_slo_requests"
    SLO_TARGET_SECONDS = "baton_slo_target_seconds"
    READY = "baton_ready"
    WORKERS = "baton_workers"
    WORKERS_HEALTH = "baton_workers_health"
    # Workers.
    BLOCKS = "baton_blocks"
    KV_USAGE = "baton_kv_usage_ratio"
    SEQUENCES_RUNNING = "baton_sequences_running"
    SEQUENCES_WAITING = "baton_sequences_waiting"
    QUEUED_PREFILL_TOKENS = "baton_queued_prefill_tokens"
    PREEMPTIONS = "baton_preemptions"
    PREFIX_TOKENS_QUERIED = "baton_prefix_tokens_queried"
    PREFIX_TOKENS_HIT = "baton_prefix_tokens_hit"
    STEPS = "baton_steps"
    STEP_SECONDS = "baton_step_seconds"
    STEP_PART_SECONDS = "baton_step_part_seconds"
    STEP_DURATION_SECONDS = "baton_step_duration_seconds"
    STEP_TOKENS = "baton_step_tokens"
    BATCH_SIZE = "baton_batch_size"
    SAMPLED_TOKENS = "baton_sampled_tokens"
    STEPS_FAILED = "baton_steps_failed"
    MS_PER_PREFILL_TOKEN = "baton_ms_per_prefill_token"
    MS_PER_DECODE_STEP = "baton_ms_per_decode_step"
    SESSIONS = "baton_sessions"
    LEASES = "baton_leases"
    LEASES_ENDED = "baton_leases_ended"
    IMPORTS = "baton_imports"
    IMPORTS_FAILED = "baton_imports_failed"
    IMPORTS_DONE = "baton_imports_ready"
    TRANSFERS_FAILED = "baton_transfers_failed"
    TRANSFER_BYTES = "baton_transfer_bytes"
    TRANSFER_SECONDS = "baton_transfer_seconds"
    TRANSFER_EXPOSED_SECONDS = "baton_transfer_exposed_seconds"
    DEVICE_MEMORY = "baton_device_memory_bytes"
    COST = "baton_cost"


class VllmMetric:
    """What endpoint pickers (the gateway API's inference extension) and vLLM's dashboards scrape, by vLLM's names."""

    RUNNING = "vllm:num_requests_running"
    WAITING = "vllm:num_requests_waiting"
    KV_USAGE = "vllm:kv_cache_usage_perc"
    # Its older name.
    KV_USAGE_OLD = "vllm:gpu_cache_usage_perc"
    CACHE_CONFIG = "vllm:cache_config"
    REQUEST_SUCCESS = "vllm:request_success"


VLLM_ALIASES: dict[str, tuple[str, ...]] = {
    Metric.REQUEST_DURATION: ("vllm:e2e_request_latency_seconds",),
    Metric.TIME_TO_FIRST_TOKEN: ("vllm:time_to_first_token_seconds",),
    Metric.TIME_PER_OUTPUT_TOKEN: ("vllm:request_time_per_output_token_seconds",),
    # The second is the older name of the first, in spite of what it says.
    Metric.INTER_TOKEN_SECONDS: ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    Metric.QUEUE_SECONDS: ("vllm:request_queue_time_seconds",),
    Metric.PROMPT_TOKENS: ("vllm:prompt_tokens",),
    Metric.OUTPUT_TOKENS: ("vllm:generation_tokens",),
    Metric.SEQUENCES_RUNNING: (VllmMetric.RUNNING,),
    Metric.SEQUENCES_WAITING: (VllmMetric.WAITING,),
    Metric.KV_USAGE: (VllmMetric.KV_USAGE, VllmMetric.KV_USAGE_OLD),
    Metric.PREEMPTIONS: ("vllm:num_preemptions",),
    Metric.PREFIX_TOKENS_QUERIED: ("vllm:prefix_cache_queries",),
    Metric.PREFIX_TOKENS_HIT: ("vllm:prefix_cache_hits",),
}
"""Ours to the names that endpoint pickers and dashboards scrape (vLLM v1)."""
