"""The cache of converted GGUF files: interrupted, crowded and impossible conversions."""

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from families import family_model
from fused_spec.errors import InvalidInput
from fused_spec.models import gguf_cache
from fused_spec.models.checkpoint import Checkpoint, open_checkpoint
from fused_spec.models.gguf_cache import converted
from gguf_entries import check, fill, gguf
from gguf_models import write_gguf

DAY = 24 * 3600
CONVERT = """
import sys, time, torch
from fused_spec.models.checkpoint import Checkpoint, open_checkpoint
from fused_spec.models.gguf_cache import converted
read = Checkpoint.tensor
def slowly(self, name, dtype=None):
    print(name, flush=True)
    time.sleep(0.1)
    return read(self, name, dtype)
with open_checkpoint(sys.argv[1]) as checkpoint:
    Checkpoint.tensor = slowly
    cached = converted(checkpoint, torch.bfloat16)
    Checkpoint.tensor = read
    same = all(torch.equal(cached.tensor(name), checkpoint.tensor(name, torch.bfloat16)) for name in cached.names())
    print("as without the cache" if same and cached is not checkpoint else "wrong", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries go: an empty cache for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fused-spec" / "gguf"


def start(path: Path) -> "subprocess.Popen[str]":
    """A process that converts a file slowly, and says the name of each tensor."""
    return subprocess.Popen([sys.executable, "-c", CONVERT, str(path)], stdout=subprocess.PIPE, text=True)


def raising(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


def test_a_killed_conversion_leaves_what_the_next_one_removes(tmp_path: Path, folder: Path) -> None:
    path = gguf(tmp_path)
    with start(path) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    (leftover,) = folder.iterdir()
    assert leftover.suffix == ".tmp"
    entry = fill(path)
    assert set(folder.iterdir()) == {entry, leftover}  # it may belong to a process that runs
    os.utime(leftover, (time.time() - DAY - 60,) * 2)
    fill(path)
    assert set(folder.iterdir()) == {entry, leftover}  # nothing is converted
    other = fill(path, torch.float16)
    assert set(folder.iterdir()) == {entry, other}
    check(path)


def test_two_processes_at_once(tmp_path: Path, folder: Path) -> None:
    path = gguf(tmp_path)
    with start(path) as first, start(path) as second:
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readline()
        assert [file.suffix for file in folder.iterdir()] == [".tmp"] * 2  # both are at it
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.read().endswith("as without the cache\n")
    assert [file.suffix for file in folder.iterdir()] == [".safetensors"]
    check(path)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), MemoryError(), RuntimeError("torch")])
def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    read = Checkpoint.tensor
    last = raising(error)
    monkeypatch.setattr(
        Checkpoint, "tensor", lambda self, name, dtype: (last if "norm" in name else read)(self, name, dtype)
    )
    with open_checkpoint(gguf(tmp_path)) as checkpoint, pytest.raises(type(error)) as caught:
        converted(checkpoint, torch.bfloat16)
    assert caught.value is error
    assert list(folder.iterdir()) == []


def test_what_is_wrong_with_the_file_is_said(tmp_path: Path, folder: Path) -> None:
    model = family_model("llama")
    model.model.norm.weight.data[0] = torch.nan
    path = write_gguf(tmp_path / "x.gguf", model, ["Q8_0"])
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(InvalidInput, match=f"^{path}: tensor model.norm.weight holds NaN .* as bfloat16$"):
            converted(checkpoint, torch.bfloat16)
        assert list(folder.iterdir()) == []
        path.unlink()
        with pytest.raises(InvalidInput, match=f"^{path}: cannot be read: No such file or directory$"):
            converted(checkpoint, torch.bfloat16)


def assert_does_without(path: Path, folder: Path, cause: str) -> None:
    with (
        open_checkpoint(path) as checkpoint,
        pytest.warns(UserWarning, match=f"^{folder}: the cache .* cannot be written: {cause}$") as caught,
    ):
        assert converted(checkpoint, torch.bfloat16) is checkpoint
    assert len(caught) == 1


def test_no_space(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert_does_without(gguf(tmp_path), folder, "No space left on device")
    assert list(folder.iterdir()) == []


def test_a_limit_on_the_size_of_files(tmp_path: Path, folder: Path) -> None:
    """A write that fails half way, with the real system calls."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = gguf(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, before[1]))
    try:
        assert_does_without(path, folder, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(folder.iterdir()) == []


def test_something_else_in_the_place_of_an_entry(tmp_path: Path, folder: Path) -> None:
    path = gguf(tmp_path)
    entry = fill(path)
    entry.unlink()
    entry.mkdir()
    assert_does_without(path, folder, "Is a directory")
    assert list(folder.iterdir()) == [entry]


def test_a_cache_that_is_a_file(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "cache").touch()
    assert_does_without(gguf(tmp_path), folder, "Not a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path, folder: Path) -> None:
    path = gguf(tmp_path)
    entry = fill(path)
    folder.chmod(0o500)
    check(path)  # what is there is used
    entry.chmod(0)
    assert_does_without(path, folder, "Permission denied")
    folder.chmod(0o700)


def test_a_read_only_folder(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf(tmp_path)
    fill(path)
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", raising(error))
    check(path)  # what is there is used
    monkeypatch.setattr(gguf_cache, "_FORMAT", "another")
    assert_does_without(path, folder, "Read-only file system")
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("home", ["no entry", "relative"])
def test_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    if home == "relative":
        monkeypatch.setenv("HOME", "here")
    else:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", raising(KeyError("uid")))
    monkeypatch.chdir(tmp_path)
    assert_does_without(
        gguf(tmp_path), Path("here" if home == "relative" else "~", ".cache/fused-spec/gguf"), "there is no home folder"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["x.gguf"]
