"""Tells routers that this worker loads, and how far it has come, until it can say what it is.

Owns: how long a load is expected to take. Never: the load itself (`main`), nor registration (`registration.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.v1 import control_pb2, types_pb2
from services.core.clock import Clock
from services.core.start_progress import StartProgress
from services.rpc.channels import Dial
from services.worker.config import WorkerConfig
from services.worker.engine_choice import VLLM
from services.worker.registration import Registrations

_START_S, _VLLM_START_S = 60.0, 300.0
"""What a start takes at most beside the reading of weights: imports, verification, and what vLLM compiles. SmolLM2-135M
has taken 40 s on a busy machine."""
_READ_BYTES_PER_S = 100e6
"""How fast weights are read and converted at least."""


def expected_load_s(engine: str, model: Path) -> float:
    """Returns within how many seconds a worker is expected to have loaded the model in that folder."""
    num_bytes = sum(file.stat().st_size for form in ("*.safetensors", "*.gguf") for file in model.glob(form))
    return (_VLLM_START_S if engine == VLLM else _START_S) + num_bytes / _READ_BYTES_PER_S


class Announcement:
    """Registers the worker as one that loads, with all its routers, while it is entered. Make and enter it on the event
    loop, with a config that has a name."""

    def __init__(
        self,
        config: WorkerConfig,
        roles: Collection[types_pb2.WorkerRole],
        model_id: str,
        dial: Dial,
        clock: Clock,
    ) -> None:
        self._config = config
        self._roles = roles
        self._model_id = model_id
        self._clock = clock
        self._until_s = clock.now() + expected_load_s(config.engine, Path(config.model))
        self._progress = ""
        self._routers = Registrations(config.worker_id, self.request, dial, lambda: None)
        self._tasks: list[asyncio.Task[None]] = []

    def tell(self, progress: StartProgress) -> None:
        """Notes how far the load has come. It may be called on any thread."""
        self._progress = f"{progress.stage}: {progress.detail}" if progress.detail else progress.stage

    def request(self) -> control_pb2.RegisterRequest:
        remaining_ms = math.ceil(max(0.0, self._until_s - self._clock.now()) * 1000)
        loading = control_pb2.LoadingWorker(
            worker_id=self._config.worker_id,
            roles=self._roles,
            model_id=self._model_id,
            ready_within_ms=remaining_ms,
            progress=self._progress,
        )
        return control_pb2.RegisterRequest(loading=loading)

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._routers.join(target)) for target in self._config.router]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
