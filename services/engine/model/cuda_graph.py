"""Captures computations as CUDA graphs.

Owns: the stream on which they are captured, and the memory that the graphs of one worker share. Never: what is
captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_RUNS_BEFORE = 2
"""Runs before a capture. The first run of a computation does what cannot be captured: libraries load kernels and take
their workspaces, such as cuBLAS's for this stream."""


class CudaGraph:
    """Implements `decode_graphs.Captured`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def launch(self) -> None:
        self._graph.replay()


class CudaCapture:
    """Implements `decode_graphs.Capture` on one device.

    Its graphs share one pool of memory: launching one may overwrite the output of another. So an output must have been
    used before the next launch of any of them, and no two may run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        # Entered here, and not by torch.cuda.graph alone, which stays on its stream if the capture fails.
        with torch.cuda.stream(self._stream):
            for _ in range(_RUNS_BEFORE):
                compute()
            # "thread_local" lets other threads, such as another engine's, allocate memory meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                output = compute()
        before.wait_stream(self._stream)
        return CudaGraph(graph, output)
