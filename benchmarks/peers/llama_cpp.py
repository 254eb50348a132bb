"""Runs in the environment of `xllamacpp`, which is llama.cpp's server inside a process: sequences, as lines on stdin
ask for them, from a GGUF file.

`python llama_cpp.py '{"gguf": FILE, "threads": N, "batch": N}'` speaks the lines of
`lines.py`. Each sequence of a batch is a request of its own, as the server's clients send them.
"""

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from lines import answer_lines  # beside this file: a peer's environment has nothing of Baton's


def main() -> None:
    options = json.loads(sys.argv[1])
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = options["gguf"]
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = options["threads"]
    settings.n_parallel = options["batch"]
    settings.n_ctx = max(options["batch"] * 512, 4096)  # one pool for all, of which a sequence may take what it needs
    settings.kv_unified = True
    settings.cache_prompt = False
    server = xllamacpp.Server(settings)
    chance = random.Random(0)

    def ask(prompt: list[int], max_tokens: int) -> int:
        asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return server.handle_completions(asked | {"cache_prompt": False})["usage"]["completion_tokens"]

    def run(count: int, prompt_tokens: int, max_tokens: int) -> float:
        prompts = [chance.choices(range(100, 49_000), k=prompt_tokens) for _ in range(count)]
        with ThreadPoolExecutor(count) as clients:
            started = time.perf_counter()
            answers = list(clients.map(ask, prompts, [max_tokens] * count))
            seconds = time.perf_counter() - started
        if answers != [max_tokens] * count:
            raise RuntimeError(f"answers of {answers} tokens, not of {max_tokens}")
        return seconds

    answer_lines(run)


if __name__ == "__main__":
    main()
