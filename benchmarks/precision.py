"""The types and weight scheme that a benchmark runs a model in, as flags of `baton up` and as an engine's settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.settings import setting
from services.cli.dtype_choice import choose_dtype
from services.cli.up import UpConfig
from services.engine.config import EngineConfig


@dataclasses.dataclass(frozen=True)
class Precision:
    """Both as the flags of the same names of `baton up`. Without `quantization` the flag is not given."""

    dtype: str = setting("auto", "type of weights and KV cache, as for baton up")
    quantization: str = setting("", "weight scheme, as for baton up, where this version has the flag")

    def __str__(self) -> str:
        return " ".join(filter(None, (self.dtype, self.quantization)))

    def chosen_for(self, model: Path) -> Precision:
        """Returns it with what `auto` means on this machine."""
        return dataclasses.replace(self, dtype=choose_dtype(self.dtype, "cpu", model, tell=print).dtype)

    def up_flags(self) -> list[str]:
        """Returns flags of `baton up`. Raises SystemExit for a flag that this version does not have."""
        flags = ["--dtype", self.dtype]
        if self.quantization:
            _demand(UpConfig, "baton up")
            flags += ["--quantization", self.quantization]
        return flags

    def engine_settings(self) -> dict[str, Any]:
        """Returns fields of EngineConfig. Raises SystemExit for one that this version does not have."""
        if not self.quantization:
            return {"dtype": self.dtype}
        _demand(EngineConfig, "the engine")
        return {"dtype": self.dtype, "quantization": self.quantization}


def parse_precision(text: str) -> Precision:
    """Returns what "bfloat16", "float32+int8" or "auto+int4" names."""
    dtype, _, quantization = text.partition("+")
    return Precision(dtype or "auto", quantization)


def _demand(config_type: type, what: str) -> None:
    if "quantization" not in {field.name for field in dataclasses.fields(config_type)}:
        raise SystemExit(f"--quantization: {what} has no such setting in this version")
