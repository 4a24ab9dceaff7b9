"""CUDA graphs of functions, all in one pool of memory."""

from collections.abc import Callable

import torch


class CudaRecorder:
    """Records what functions launch on a device, and replays it."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function, which compiles its kernels, then record it on a stream of its own."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
            current.wait_stream(self._stream)
        return graph.replay

    def mark(self) -> Callable[[], None]:
        """An event on the current stream; waiting for it leaves later launches alone."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize
