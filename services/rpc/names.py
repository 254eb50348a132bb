"""Names every span, attribute, event and metric in one place, so that processes, dashboards and `baton trace` agree.

Owns: names. Never: anything else. `gen_ai.*` follow the OpenTelemetry GenAI semantic conventions; `baton.*` are Baton's
own. Baton's names contain their units; durations of the GenAI metrics are in seconds.
"""

from __future__ import annotations


class Span:
    """Names the spans (docs/tracing.md).

    The first five, PARK and DECODE are spans of the router. A name with a dot is a child of the part before the dot.
    """

    REQUEST = "baton.request"
    TOKENIZE = "tokenize"
    QUEUE = "queue"
    PLACE = "place"
    PREFILL = "prefill"
    # Prefill worker: from the command's arrival to admission, and from admission to the sampled token.
    PREFILL_WAIT = "prefill.wait"
    PREFILL_COMPUTE = "prefill.compute"
    # Decode worker: from the first block announced to a valid release.
    KV_TRANSFER = "kv.transfer"
    # Router: a store's leg, until the store has the handoff.
    PARK = "park"
    # Store: from the command's arrival to a valid release, after which the store leases the KV out itself.
    KV_PARK = "kv.park"
    # The worker that computes the prompt: from the open fetch of blocks of another's prefix cache to a valid release.
    KV_FETCH = "kv.fetch"
    DECODE = "decode"
    # Decode worker: from the import's READY to the first step that has the sequence, and from there to its end.
    DECODE_WAIT = "decode.wait"
    DECODE_RUN = "decode.run"


class Event:
    # On the root span, when the first token leaves the router.
    FIRST_TOKEN = "first_token"
    # On the root span, when a leg was given up and the request placed again.
    RETRY = "retry"
    # On prefill.compute, one for each chunk.
    CHUNK = "chunk"
    # On kv.transfer and kv.park, when SEALED was received; the rest of the transfer is exposed.
    SEALED = "sealed"
    # On decode.run, when the worker took the sequence's blocks for other sequences.
    PREEMPTED = "preempted"


class Attr:
    # On resources and RPCs.
    ERROR_TYPE = "error.type"
    # GenAI attributes, on the root span.
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
    # In seconds.
    TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    CONVERSATION_ID = "gen_ai.conversation.id"
    # On every span.
    REQUEST_ID = "baton.request_id"
    # On spans that belong to one leg, and on the workers' spans.
    LEG = "baton.leg"
    ATTEMPT = "baton.attempt"
    # How the router's stage ended: "done", "lost", "cancelled", ...
    OUTCOME = "baton.outcome"
    WORKER = "baton.worker"
    PREFILL_WORKER = "baton.prefill.worker"
    DECODE_WORKER = "baton.decode.worker"
    # On the root span.
    TTFT_MS = "baton.ttft_ms"
    RETRIES = "baton.retries"
    PRIORITY = "baton.priority"
    TENANT = "baton.tenant"
    # What the request costs by its tenant's prices; only of a named tenant.
    REQUEST_COST = "baton.cost"
    # On place: the number of decode workers that refused the leg.
    NUM_REFUSALS = "baton.place.num_refusals"
    # On prefill, decode and place: why the leg's worker was chosen, and what the next best had. The name of the term
    # that decided, or "tie", "only", "aged".
    PLACEMENT_DECIDED_BY = "baton.placement.decided_by"
    PLACEMENT_NUM_CANDIDATES = "baton.placement.num_candidates"
    # Sums of the terms, and "term=weighted value" for each.
    PLACEMENT_SCORE = "baton.placement.score"
    PLACEMENT_TERMS = "baton.placement.terms"
    RUNNER_UP = "baton.placement.runner_up"
    RUNNER_UP_SCORE = "baton.placement.runner_up.score"
    RUNNER_UP_TERMS = "baton.placement.runner_up.terms"
    # On prefill.compute, and on its chunk events.
    NUM_TOKENS = "baton.num_tokens"
    CACHED_TOKENS = "baton.cached_tokens"
    NUM_CHUNKS = "baton.prefill.num_chunks"
    # On kv.transfer, kv.park and kv.fetch.
    TRANSFER_BYTES = "baton.transfer.bytes"
    TRANSFER_BLOCKS = "baton.transfer.blocks"
    # On kv.transfer: the blocks of the handoff that the decode worker had before.
    TRANSFER_BLOCKS_NOT_MOVED = "baton.transfer.blocks_not_moved"
    # "shm", "nixl", "tcp", "grpc" or "local".
    TRANSFER_TRANSPORT = "baton.transfer.transport"
    TRANSFER_OVERLAPPED_MS = "baton.transfer.overlapped_ms"
    TRANSFER_EXPOSED_MS = "baton.transfer.exposed_ms"
    LEASE_ID = "baton.lease_id"
    # On kv.fetch: the address of the worker or store that had the blocks.
    SOURCE = "baton.transfer.source"
    # On decode.run.
    NUM_STEPS = "baton.decode.num_steps"
    MEAN_BATCH_SIZE = "baton.decode.mean_batch_size"
    FIRST_STEP_MS = "baton.decode.first_step_ms"
    INTER_TOKEN_P50_MS = "baton.decode.inter_token_p50_ms"
    INTER_TOKEN_P99_MS = "baton.decode.inter_token_p99_ms"
    INTER_TOKEN_MAX_MS = "baton.decode.inter_token_max_ms"
    NUM_PREEMPTIONS = "baton.decode.num_preemptions"


class Metric:
    """Names the Prometheus metrics. The client library appends `_total` to counters."""

    # OpenTelemetry GenAI server metrics, in the Prometheus spelling: histograms in seconds.
    REQUEST_DURATION = "gen_ai_server_request_duration_seconds"
    TIME_TO_FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
    TIME_PER_OUTPUT_TOKEN = "gen_ai_server_time_per_output_token_seconds"
    # Metrics of the router.
    REQUESTS = "baton_requests"
    REQUESTS_LIVE = "baton_requests_live"
    PROMPT_TOKENS = "baton_prompt_tokens"
    OUTPUT_TOKENS = "baton_output_tokens"
    INTER_TOKEN_SECONDS = "baton_inter_token_seconds"
    PHASE_SECONDS = "baton_phase_seconds"
    QUEUE_SECONDS = "baton_queue_seconds"
    QUEUE_LIMIT = "baton_queue_limit"
    RETRIES = "baton_retries"
    HANDOFFS_PARKED = "baton_handoffs_parked"
    SLO_REQUESTS = "baton_slo_requests"
    SLO_TARGET_SECONDS = "baton_slo_target_seconds"
    READY = "baton_ready"
    MODEL_READY = "baton_model_ready"
    TENANT_REQUESTS = "baton_tenant_requests"
    TENANT_TOKENS = "baton_tenant_tokens"
    TENANT_COST = "baton_tenant_cost"
    USAGE_DROPPED = "baton_usage_log_dropped"
    REQUEST_LOG_DROPPED = "baton_request_log_dropped"
    CERTIFICATE_EXPIRES = "baton_certificate_expires_seconds"
    LIMIT_STORE_UP = "baton_tenants_store_up"
    INTERNAL_ERRORS = "baton_internal_errors"
    WORKERS = "baton_workers"
    WORKERS_HEALTH = "baton_workers_health"
    WORKERS_EJECTED = "baton_workers_ejected"
    # Metrics of workers.
    BLOCKS = "baton_blocks"
    KV_USAGE = "baton_kv_usage_ratio"
    SEQUENCES_RUNNING = "baton_sequences_running"
    SEQUENCES_WAITING = "baton_sequences_waiting"
    QUEUED_PREFILL_TOKENS = "baton_queued_prefill_tokens"
    PREEMPTIONS = "baton_preemptions"
    PREFIX_TOKENS_QUERIED = "baton_prefix_tokens_queried"
    PREFIX_TOKENS_HIT = "baton_prefix_tokens_hit"
    PREFIX_TOKENS_BROUGHT = "baton_prefix_tokens_brought"
    PREFIXES_FAILED = "baton_prefixes_failed"
    PREFIX_TOKENS_LENT = "baton_prefix_tokens_lent"
    STEPS = "baton_steps"
    STEP_SECONDS = "baton_step_seconds"
    STEP_PART_SECONDS = "baton_step_part_seconds"
    STEP_DURATION_SECONDS = "baton_step_duration_seconds"
    STEP_TOKENS = "baton_step_tokens"
    BATCH_SIZE = "baton_batch_size"
    SAMPLED_TOKENS = "baton_sampled_tokens"
    STEPS_FAILED = "baton_steps_failed"
    PREFILL_TOKEN_SECONDS = "baton_prefill_token_seconds"
    DECODE_STEP_SECONDS = "baton_decode_step_seconds"
    SESSIONS = "baton_sessions"
    LEASES = "baton_leases"
    LEASES_ENDED = "baton_leases_ended"
    IMPORTS = "baton_imports"
    IMPORTS_FAILED = "baton_imports_failed"
    IMPORTS_DONE = "baton_imports_ready"
    TRANSFERS_FAILED = "baton_transfers_failed"
    TRANSFER_BYTES = "baton_transfer_bytes"
    TRANSFER_SECONDS = "baton_transfer_seconds"
    KV_BLOCKS_NOT_MOVED = "baton_kv_blocks_not_moved"
    TRANSFER_EXPOSED_SECONDS = "baton_transfer_exposed_seconds"
    KV_TIER_BYTES = "baton_kv_tier_bytes"
    KV_TIER_BLOCKS = "baton_kv_tier_blocks"
    KV_TIER_SECONDS = "baton_kv_tier_seconds"
    KV_TIER_FAILURES = "baton_kv_tier_failures"
    KV_TIER_LEFT_OUT = "baton_kv_tier_left_out"
    KV_BLOCKS_LOST = "baton_kv_blocks_lost"
    DEVICE_MEMORY = "baton_device_memory_bytes"
    COST = "baton_cost"


INTERNAL_ERRORS_TEXT = (
    "Exceptions that nobody expected, by what was being done; each is in the log and ended one request at most"
)


class VllmMetric:
    """Names, as vLLM does, the metrics that endpoint pickers (the gateway API's inference extension) and dashboards
    scrape."""

    RUNNING = "vllm:num_requests_running"
    WAITING = "vllm:num_requests_waiting"
    KV_USAGE = "vllm:kv_cache_usage_perc"
    # The older name of KV_USAGE.
    KV_USAGE_OLD = "vllm:gpu_cache_usage_perc"
    CACHE_CONFIG = "vllm:cache_config"
    REQUEST_SUCCESS = "vllm:request_success"


VLLM_ALIASES: dict[str, tuple[str, ...]] = {
    Metric.REQUEST_DURATION: ("vllm:e2e_request_latency_seconds",),
    Metric.TIME_TO_FIRST_TOKEN: ("vllm:time_to_first_token_seconds",),
    Metric.TIME_PER_OUTPUT_TOKEN: ("vllm:request_time_per_output_token_seconds",),
    # The second name is the older name of the first, although it says something else.
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
"""For each metric of Baton, the names under which endpoint pickers and vLLM's dashboards scrape it (vLLM v1)."""
