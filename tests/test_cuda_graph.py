"""In what order a function is run and recorded, with torch.cuda stood in for: what CUDA makes of it needs a GPU."""

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from fused_spec.cuda_graph import CudaRecorder


class FakeCuda:
    """Notes what is done, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        fake = self

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_stream(self, other: "Stream") -> None:
                fake.done.append(f"{self.name} waits for {other.name}")

        class Graph:
            def replay(self) -> None:
                fake.done.append("replay")

        class Event:
            def record(self, stream: Stream) -> None:
                fake.done.append(f"event on {stream.name}")

            def synchronize(self) -> None:
                fake.done.append("wait")

        @contextmanager
        def inside(name: str) -> Any:
            fake.done.append(f"enter {name}")
            yield
            fake.done.append(f"leave {name}")

        def graph(graph: Graph, *, pool: str, stream: Stream, capture_error_mode: str) -> Any:
            return inside(f"capture in {pool} on {stream.name}, {capture_error_mode}")

        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        patch.setattr(torch.cuda, "Stream", lambda device: Stream("own"))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream("current"))
        patch.setattr(torch.cuda, "stream", lambda stream: inside(stream.name))
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", graph)
        patch.setattr(torch.cuda, "Event", Event)


def test_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled by a run outside of the capture, on the stream that captures; graphs share one pool."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda", 0))
    expected = [
        "own waits for current",
        "enter own",
        "run",
        "leave own",
        "enter capture in pool on own, thread_local",
        "run",
        "leave capture in pool on own, thread_local",
        "current waits for own",
    ]
    replays = []
    for _ in range(2):
        cuda.done.clear()
        replays.append(recorder.record(lambda: cuda.done.append("run")))
        assert cuda.done == expected
    cuda.done.clear()
    replays[0]()
    wait = recorder.mark()
    replays[1]()
    wait()
    assert cuda.done == ["replay", "event on current", "replay", "wait"]
    assert recorder.pinned
