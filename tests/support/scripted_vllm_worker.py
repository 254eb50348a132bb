"""Is a process with a `VllmEngine` over `scripted_vllm`, for tests that kill and stop it. Usage: python -m
tests.support.scripted_vllm_worker MODEL FOLDER. It prints the pids of vLLM's processes and its folder as JSON, and
then, for each line that it reads, what it says after a prompt, or why vLLM is over."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.scripted_vllm_engine import Driver, ScriptedVllm, engine_config, processes


def main() -> None:
    model, folder = (Path(word) for word in sys.argv[1:])
    vllm = ScriptedVllm(folder, tensor_parallel_size="2")
    vllm.controls.set("share")
    engine = vllm.load(engine_config(model))
    print(json.dumps({"pids": processes(engine), "folder": engine._process.folder}), flush=True)
    driver = Driver(engine)
    for _ in sys.stdin:
        sequence = driver.add([7, 8, 9], 5)
        driver.until(lambda sequence=sequence: driver.is_over(sequence) or not engine.alive, "it ends")
        print(json.dumps({"said": driver.said(sequence), "why_over": engine.why_over}), flush=True)


if __name__ == "__main__":
    main()
