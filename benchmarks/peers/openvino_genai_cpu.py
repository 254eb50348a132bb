"""Runs in the environment of OpenVINO GenAI: sequences, as lines on stdin ask for them, from a GGUF file.

`python openvino_genai_cpu.py '{"gguf": FILE, "threads": N, "batch": N}'` speaks the lines of `lines.py`. The library
keeps the file's four bits.
"""

import json
import random
import sys
import time

from lines import answer_lines  # beside this file: a peer's environment has nothing of Baton's


def main() -> None:
    options = json.loads(sys.argv[1])
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = options["batch"]
    scheduler.cache_size = 2  # GB
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options["gguf"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": options["threads"]}
    )
    chance = random.Random(0)

    def run(count: int, prompt_tokens: int, max_tokens: int) -> float:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        prompts = [
            openvino.Tensor(numpy.array([chance.choices(range(100, 49_000), k=prompt_tokens)], dtype=numpy.int64))
            for _ in range(count)
        ]
        started = time.perf_counter()
        answers = pipeline.generate(prompts, [config] * count)
        seconds = time.perf_counter() - started
        if any(len(answer.m_generation_ids[0]) != max_tokens for answer in answers):
            raise RuntimeError("an answer is shorter than was asked for")
        return seconds

    answer_lines(run)


if __name__ == "__main__":
    main()
