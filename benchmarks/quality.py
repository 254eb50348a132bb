"""Measures what fewer bits cost in quality: perplexity, and distance from the model in float32.

`python -m benchmarks.quality [--of weights|kv] [--model NAME] [--json FILE]`. The texts of `benchmarks/data` are read
in windows; the first tokens of each are context only. Beside the schemes of `--quantization` it measures bfloat16
alone. With `--of kv`, keys and values are rounded instead of weights, to what `--kv-dtype` would keep.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoTokenizer, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.figure import Figure
from benchmarks.result import Result
from services.cli.model_names import resolve_model
from services.core.config import KEPT_BLOCKS_FILE
from services.core.process_config import DEFAULT_MODEL
from services.engine.attention.int8_rows import as_numbers, packed
from services.engine.cpu.quantisation import quantise
from services.engine.model import weights

_DATA = Path(__file__).parent / "data"
_WINDOW, _CONTEXT = 512, 32
"""Tokens of a window, and those at its begin that are not counted."""
_SCHEMES = (("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8"))
_SCHEMES += (("float32", "int4"), ("bfloat16", "int4"))
_KV_SCHEMES = (("float32", "float32"), ("float32", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8"))
"""Types of weights and activations, and of keys and values."""


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


def measure_kv(directory: Path) -> list[Figure]:
    """Returns the figures of each type of keys and values."""
    for kv_dtype in ("bfloat16", "int8"):
        AttentionInterface.register(f"rounded_{kv_dtype}", partial(_attend_rounded, weights.KV_DTYPES[kv_dtype]))
        AttentionMaskInterface.register(f"rounded_{kv_dtype}", sdpa_mask)
    models = {
        (dtype, kv_dtype): weights.load_model(
            directory, dtype, torch.device("cpu"), "sdpa" if dtype == kv_dtype else f"rounded_{kv_dtype}"
        )
        for dtype, kv_dtype in _KV_SCHEMES
    }
    sums = {scheme: _Sums() for scheme in _KV_SCHEMES}
    for window in _windows(directory):
        reference = _log_probabilities(models["float32", "float32"], window)
        for scheme, model in models.items():
            sums[scheme].add(_log_probabilities(model, window), reference, window[_CONTEXT + 1 :])
    return [figure for (dtype, kv), each in sums.items() for figure in each.figures(f"{dtype}, {kv} KV")]


def _attend_rounded(
    kv_dtype: torch.dtype,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention as transformers does, over keys and values as a pool would keep them."""

    def kept(rows: Tensor) -> Tensor:
        rounded = packed(rows) if kv_dtype == torch.int8 else rows.to(kv_dtype)
        return as_numbers(rounded, rows.dtype).to(rows.dtype)

    return sdpa_attention_forward(module, query, kept(key), kept(value), mask, **kwargs)


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
    parser.add_argument("--of", choices=("weights", "kv"), default="weights", help="what is rounded")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--json", type=Path, default=Path("out/quality.json"))
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    result = Result({"model": model.model_id, "texts": sorted(path.name for path in _DATA.glob("*.txt"))})
    result.add(measure_kv(model.path) if arguments.of == "kv" else measure(model.path))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
