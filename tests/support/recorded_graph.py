"""Stands for CUDA graphs on a CPU: a computation is recorded operator by operator, and launched on the same memory.

As in a CUDA graph, Python does not run again: tensors keep their addresses, and numbers stay what they were at the
capture. What a capture forbids is refused: to read a tensor on the host, to make one of the host's numbers, and to call
operators whose result has a shape that depends on what is in a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FORBIDDEN = {
    "aten._local_scalar_dense": "reads a tensor on the host",
    "aten.equal": "reads a tensor on the host",
    "aten.nonzero": "has a shape that depends on what is in a tensor",
    "aten.masked_select": "has a shape that depends on what is in a tensor",
    "aten.lift_fresh": "makes a tensor of numbers of the host",
}
_INDEXING = {"aten.index", "aten.index_put", "aten.index_put_"}
"""Operators that look for the true places of an index of booleans."""


@contextlib.contextmanager
def _as_while_capturing() -> Iterator[None]:
    """Makes torch say what it says during a capture: transformers then leaves checks out that read tensors."""
    before = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = before


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function.overloadpacket)
        if name in _INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1]):
            name = "aten.nonzero"
        if name in _FORBIDDEN:
            raise RuntimeError(f"not permitted while a graph is captured: {name} {_FORBIDDEN[name]}")
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result


class RecordedGraph:
    """Implements `decode_graphs.Captured`."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        with _as_while_capturing(), _Recorder() as recorder:
            self.output = compute()
        self._calls = recorder.calls
        self.num_launches = 0

    def launch(self) -> None:
        self.num_launches += 1
        for function, args, kwargs, before in self._calls:
            _overwrite(before, function(*args, **kwargs))


def _overwrite(before: Any, now: Any) -> None:
    """Puts the result of a call where its first one is. A view, or a tensor changed in place, is there already."""
    if isinstance(before, Tensor):
        if before.data_ptr() != now.data_ptr():
            before.copy_(now)
    elif isinstance(before, tuple | list):
        for each, new in zip(before, now, strict=True):
            _overwrite(each, new)


def capture(compute: Callable[[], Tensor]) -> RecordedGraph:
    """Implements `decode_graphs.Capture`, with a run before the recording as on a device."""
    compute()
    return RecordedGraph(compute)


def without_capture(compute: Callable[[], Tensor]) -> RecordedGraph:
    """Refuses every capture, as a device does on which a computation cannot be captured."""
    raise RuntimeError("operation not permitted when stream is capturing")
