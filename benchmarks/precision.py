"""Names the types and the weight scheme that a benchmark runs a model in, as flags of `baton up` and as an engine's
settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.settings import setting
from services.cli.dtype_choice import choose_dtype


@dataclasses.dataclass(frozen=True)
class Precision:
    """Names each as the flags of `baton up` do."""

    dtype: str = setting("auto", "type of weights and activations, as for baton up")
    quantization: str = setting("auto", "weight scheme, as for baton up")
    kv_dtype: str = setting("auto", "type of the KV cache, as for baton up")

    def __str__(self) -> str:
        weights = self.dtype if self.quantization == "none" else f"{self.dtype} {self.quantization}"
        return weights if self.kv_dtype == "auto" else f"{weights}, {self.kv_dtype} KV"

    def chosen_for(self, model: Path) -> Precision:
        """Returns it with what `auto` means on this machine."""
        choice = choose_dtype(self.dtype, "cpu", model, self.quantization)
        return Precision(choice.dtype, choice.quantization, self.kv_dtype)

    def up_flags(self) -> list[str]:
        """Returns flags of `baton up`."""
        return ["--dtype", self.dtype, "--quantization", self.quantization, "--kv-dtype", self.kv_dtype]


def parse_precision(text: str) -> Precision:
    """Returns what "bfloat16" (weights as saved), "float32+int8" or "auto+int4" names."""
    dtype, _, quantization = text.partition("+")
    return Precision(dtype or "auto", quantization or "none")
