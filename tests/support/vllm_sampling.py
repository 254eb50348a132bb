"""Runs in vLLM's Python: samples as vLLM's model runner does, over given logits, and prints the tokens.

Standard input has JSON: `logits`, [vocab_size], and `cases`, each with `params`, `prompt`, `num_prompt`, `received` and
`seeds`: a row of the batch has each of the seeds, and the output `received` before, which vLLM has produced. `removed`
and `moved` are what becomes of the batch then, as vLLM has it. It prints a list for each case: the tokens by place.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from services.vllm.inside.sampling import BatonSampling


def sample(logits: torch.Tensor, case: dict[str, Any]) -> list[int]:
    processor = BatonSampling(None, torch.device("cpu"), False)
    added = []
    for place, seed in enumerate(case["seeds"]):
        baton = {
            "id": place,
            "params": {**case["params"], "seed": seed},
            "further": [],
            "num_prompt": case["num_prompt"],
            "stop": case.get("stop", []),
            "min_tokens": case.get("min_tokens", 0),
        }
        params = SamplingParams(temperature=0.0, extra_args={"baton": baton})
        added.append((place, params, case["prompt"], case["received"]))
    processor.update_state(BatchUpdate(len(added), [], added, []))
    moved = [(*pair, MoveDirectionality[way]) for *pair, way in case.get("moved", [])]
    if moved or case.get("removed"):
        num_left = len(added) - len(case["removed"])
        processor.update_state(BatchUpdate(num_left, case["removed"], [], moved))
        added = added[:num_left]
    return processor.apply(logits.repeat(len(added), 1)).argmax(-1).tolist()  # as vLLM does with temperature 0


def main() -> None:
    asked = json.load(sys.stdin)
    logits = torch.tensor(asked["logits"])
    print(json.dumps([sample(logits, case) for case in asked["cases"]]))


if __name__ == "__main__":
    main()
