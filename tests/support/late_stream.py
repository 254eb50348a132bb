"""Stands for a device's stream on a CPU: what is queued is done as late as permitted, when somebody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Queueing(TorchDispatchMode):
    def __init__(self, queue: deque[Callable[[], Any]]) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.overloadpacket.__name__.endswith("_"):
            return function(*args, **(kwargs or {}))  # a view
        self._queue.append(lambda: function(*args, **(kwargs or {})))
        return args[0]


class LateStream:
    """Implements `device_copies.CopyStream`."""

    def __init__(self, device: torch.device) -> None:
        self.queue: deque[Callable[[], Any]] = deque()
        self.num_marks = 0
        self._num_done = 0

    def queueing(self) -> AbstractContextManager[object]:
        return _Queueing(self.queue)

    def mark(self) -> Callable[[], None]:
        self.num_marks += 1
        upto = self._num_done + len(self.queue)

        def wait() -> None:
            while self._num_done < upto:
                self.queue.popleft()()
                self._num_done += 1

        return wait
