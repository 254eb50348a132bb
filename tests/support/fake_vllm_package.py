"""Has what `services.vllm.inside` imports of vLLM, where there is no vLLM: bases that do nothing, under vLLM's names.

So the connector and the sampler are tested where vLLM is not installed, as vLLM 0.32 calls them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_INSIDE = "services.vllm.inside"


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class ConnectorBase:
    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


class ConnectorMetadata:
    pass


@dataclass(frozen=True)
class TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = 0
    SWAP = 1


def _modules() -> dict[str, ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        _BASE: {
            "KVConnectorBase_V1": ConnectorBase,
            "KVConnectorMetadata": ConnectorMetadata,
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": TransferResults,
        },
        "vllm": {"SamplingParams": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(DELTA=1)},
        "vllm.config": {
            "get_current_vllm_config_or_none": lambda: None,
            "get_layers_from_vllm_config": lambda config, kind: {},
        },
        "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": object},
        "vllm.v1.sample.logits_processor.interface": {
            "LogitsProcessor": object,
            "MoveDirectionality": MoveDirectionality,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(get_device_name=lambda: "none")},
    }
    modules: dict[str, ModuleType] = {}
    for name, attributes in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            modules.setdefault(path, ModuleType(path)).__path__ = []
        vars(modules[name]).update(attributes)
    return modules


@contextmanager
def inside(name: str) -> Iterator[Any]:
    """Yields a module of `services.vllm.inside`, which has this package instead of vLLM."""
    modules = _modules()
    sys.modules.update(modules)
    try:
        yield importlib.import_module(f"{_INSIDE}.{name}")
    finally:
        for path in [*modules, f"{_INSIDE}.connector", f"{_INSIDE}.sampling"]:
            sys.modules.pop(path, None)
