"""Measures what packing weights into fewer bits costs in quality: perplexity, and distance from the model in float32.

`python -m benchmarks.quality [--model NAME] [--json FILE]`. The texts of `benchmarks/data` are read in windows; the
first tokens of each are context only. Beside the schemes of `--quantization` it measures bfloat16 alone.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.figure import Figure
from benchmarks.result import Result
from services.cli.model_cache import DEFAULT_MODEL
from services.cli.model_names import resolve_model
from services.core.config import KEPT_BLOCKS_FILE
from services.engine.cpu.quantisation import quantise
from services.engine.model import weights

_DATA = Path(__file__).parent / "data"
_WINDOW, _CONTEXT = 512, 32
"""Tokens of a window, and those at its begin that are not counted."""
_SCHEMES = (("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8"))
_SCHEMES += (("float32", "int4"), ("bfloat16", "int4"))


class _Sums:
    """Adds up what one scheme gave over tokens, in nats."""

    def __init__(self) -> None:
        self.num_tokens = self.num_same = 0
        self.surprise = self.distance = 0.0

    def add(self, found: Tensor, reference: Tensor, wanted: Tensor) -> None:
        """Adds log-probabilities [tokens, vocab_size] of the scheme and of float32, and the tokens that follow."""
        self.num_tokens += len(wanted)
        self.num_same += int((found.argmax(-1) == reference.argmax(-1)).sum())
        self.surprise -= found.gather(-1, wanted[:, None]).sum().item()
        self.distance += (reference.exp() * (reference - found)).sum().item()

    def figures(self, name: str) -> list[Figure]:
        return [
            Figure(f"{name}: perplexity", "", (math.exp(self.surprise / self.num_tokens),)),
            Figure(f"{name}: mean KL divergence from float32", "nats", (self.distance / self.num_tokens,)),
            Figure(f"{name}: same best token as float32", "%", (100 * self.num_same / self.num_tokens,)),
        ]


def measure(directory: Path) -> list[Figure]:
    """Returns the figures of each scheme, that of a GGUF file included if its weights were kept."""
    schemes = list(_SCHEMES)
    if (directory / KEPT_BLOCKS_FILE).is_file():
        schemes += [("float32", "gguf"), ("bfloat16", "gguf")]
    models = {scheme: _model(directory, *scheme) for scheme in schemes}
    sums = {scheme: _Sums() for scheme in schemes}
    for window in _windows(directory):
        reference = _log_probabilities(models["float32", "none"], window)
        for scheme, model in models.items():
            sums[scheme].add(_log_probabilities(model, window), reference, window[_CONTEXT + 1 :])
    return [figure for scheme, each in sums.items() for figure in each.figures(" ".join(scheme))]


def _model(directory: Path, dtype: str, quantization: str) -> PreTrainedModel:
    model = weights.load_model(directory, dtype, torch.device("cpu"), "sdpa")
    quantise(model, quantization, directory)
    return model


def _windows(directory: Path) -> list[Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    windows = []
    for path in sorted(_DATA.glob("*.txt")):
        _, _, text = path.read_text().partition("\n\n")  # the first line says what it is
        windows += torch.tensor(tokenizer(text).input_ids).split(_WINDOW)
    return [window for window in windows if len(window) > 2 * _CONTEXT]


@torch.inference_mode()
def _log_probabilities(model: PreTrainedModel, window: Tensor) -> Tensor:
    """Returns [tokens, vocab_size] for the tokens after the context."""
    logits: Tensor = model(window[None], use_cache=False).logits[0, _CONTEXT:-1]
    return logits.float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--json", type=Path, default=Path("out/quality.json"))
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    result = Result({"model": model.model_id, "texts": sorted(path.name for path in _DATA.glob("*.txt"))})
    result.add(measure(model.path))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
