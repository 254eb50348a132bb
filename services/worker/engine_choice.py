"""Defines the flags that choose a worker's engine. Nothing here imports an engine: `baton up` has the same flags."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.core.config import option
from services.core.errors import ConfigError

TORCH, VLLM = "torch", "vllm"
ENGINES = (TORCH, VLLM)

_ARGUMENT = re.compile(r"([a-z][a-z0-9_]*)=(.*)", re.DOTALL)


def _is_argument(text: str) -> bool:
    return _ARGUMENT.fullmatch(text) is not None


@dataclass(frozen=True)
class EngineChoice:
    """Keeps the flags that say what computes."""

    engine: str = option(
        TORCH, "what computes; vllm runs in an environment of its own, which make vllm makes", choices=ENGINES
    )
    engine_arg: tuple[str, ...] = option(
        (),
        "with --engine vllm, an argument of vLLM's AsyncEngineArgs, such as tensor_parallel_size=2; repeatable",
        check=_is_argument,
        must="is not NAME=VALUE with the name of an argument, such as tensor_parallel_size=2",
    )
    vllm_python: str = option("", "with --engine vllm, the Python that has vLLM (default: the one that make vllm made)")

    def engine_arguments(self) -> dict[str, str]:
        """Returns the arguments of `--engine-arg` by name. Raises ConfigError if one is given twice, or to an engine
        that has none."""
        if self.engine_arg and self.engine != VLLM:
            raise ConfigError(f"--engine-arg: {self.engine_arg[0]!r} is for --engine vllm, and this is {self.engine}")
        arguments: dict[str, str] = {}
        for text in self.engine_arg:
            name, _, value = text.partition("=")
            if name in arguments:
                raise ConfigError(f"--engine-arg: {name} is given twice")
            arguments[name] = value
        return arguments
