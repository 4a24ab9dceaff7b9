"""The cache of converted GGUF files: the same numbers as without it, whatever becomes of its entries."""

import os
import shutil
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from families import family_model
from fused_spec import Engine
from fused_spec.errors import InvalidInput
from fused_spec.models import gguf_cache
from fused_spec.models.checkpoint import Checkpoint, open_checkpoint
from fused_spec.models.gguf_cache import converted
from fused_spec.models.gguf_file import GGUFFile
from gguf_entries import assert_same, check, fill, gguf, weights
from gguf_models import write_gguf

BFLOAT16 = torch.bfloat16


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where entries go: an empty cache for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fused-spec" / "gguf"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The entries that were written."""
    written = []
    write = gguf_cache._write

    def record(checkpoint: Checkpoint, dtype: torch.dtype, path: Path, origin: dict[str, str]) -> None:
        written.append(path)
        write(checkpoint, dtype, path, origin)

    monkeypatch.setattr(gguf_cache, "_write", record)
    return written


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True)])
def test_gives_what_the_file_gives(
    tmp_path: Path, folder: Path, conversions: list[Path], family: str, tied: bool, dtype: torch.dtype
) -> None:
    path = gguf(tmp_path, family, tied=tied)
    for _ in range(2):
        with open_checkpoint(path) as checkpoint, converted(checkpoint, dtype) as cached:
            assert (cached.path, cached.config, cached.names()) == (path, checkpoint.config, checkpoint.names())
            assert cached.source.fields is checkpoint.source.fields
            assert_same({name: cached.tensor(name) for name in cached.names()}, weights(checkpoint, dtype))
            assert_same(weights(cached, torch.float32), {n: w.float() for n, w in weights(checkpoint, dtype).items()})
            entry = Path(cached.source.file_of("model.norm.weight"))
        assert [entry] == list(folder.iterdir()) == conversions
        assert int.from_bytes(entry.read_bytes()[:8], "little") % 8 == 0  # so that tensors are aligned in memory
        with safe_open(entry, framework="pt") as file:  # as others see it
            assert set(file.keys()) == set(cached.names())
            assert file.metadata()["source"] == str(path)


def test_the_real_file(smollm2_path: Path) -> None:
    check(smollm2_path)


def test_closing_closes_both(tmp_path: Path, folder: Path) -> None:
    checkpoint = open_checkpoint(gguf(tmp_path))
    cached = converted(checkpoint, BFLOAT16)
    cached.close()
    for closed in (cached, checkpoint):
        with pytest.raises(InvalidInput, match="checkpoint is closed"):
            closed.tensor("model.norm.weight")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_files_without_quantised_tensors_are_read_as_they_are(tmp_path: Path, folder: Path, kind: str) -> None:
    family_model("llama").save_pretrained(tmp_path)
    for path in (gguf(tmp_path, kind=kind), tmp_path):
        with open_checkpoint(path) as checkpoint:
            assert converted(checkpoint, BFLOAT16) is checkpoint
    assert not folder.exists()


def test_engine_reads_target_and_draft_from_it(
    tmp_path: Path, folder: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = gguf(tmp_path), gguf(tmp_path, "qwen2", name="y.gguf")
    engines = [Engine.from_pretrained(target, draft=draft, max_length=64, dtype="float32")]
    monkeypatch.setattr(GGUFFile, "load", None)
    engines.append(Engine.from_pretrained(target, draft=draft, max_length=64, dtype="float32"))
    first, second = (engine.generate([1, 2, 3], max_new_tokens=20, seed=1).token_ids for engine in engines)
    assert first == second
    assert len(set(conversions)) == len(conversions) == 2


@pytest.mark.parametrize(
    ("xdg", "home", "where"),
    [("/a/b", "/home/me", "/a/b"), ("a/b", "/home/me", "/home/me/.cache"), ("", "/home/me", "/home/me/.cache"),
     (None, "/home/me", "/home/me/.cache")],
)  # fmt: skip
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, xdg: str | None, home: str, where: str) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME") if xdg is None else monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert gguf_cache._folder() == Path(where) / "fused-spec" / "gguf"


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, last = Checkpoint.tensor, weakref.ref(torch.empty(0))

    def alone(self: Checkpoint, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal last
        assert last() is None
        weight = read(self, name, dtype)
        last = weakref.ref(weight)
        return weight

    monkeypatch.setattr(Checkpoint, "tensor", alone)
    fill(gguf(tmp_path))


@pytest.mark.parametrize("keep_mtime", [False, True])
def test_a_changed_file_replaces_its_entry(tmp_path: Path, folder: Path, keep_mtime: bool) -> None:
    path = gguf(tmp_path)
    entry, before = fill(path), path.stat()
    with path.open("r+b") as file:
        file.seek(GGUFFile(path).tensors["model.norm.weight"].offset)
        file.write(b"\0" * 8)
    if keep_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    check(path)
    assert list(folder.iterdir()) == [entry]


def test_a_file_replaced_since_it_was_opened(tmp_path: Path, folder: Path) -> None:
    """Its header is as long as that of the other, but other tensors are behind it."""
    path, other = gguf(tmp_path), gguf(tmp_path, kind="Q5_0", name="y.gguf")
    with open_checkpoint(path) as checkpoint:
        os.replace(other, path)
        converted(checkpoint, BFLOAT16)
    check(path)


def test_dtypes_and_files_have_their_own_entries(tmp_path: Path, folder: Path, conversions: list[Path]) -> None:
    first, second = gguf(tmp_path), gguf(tmp_path, name="y.gguf")
    for _ in range(2):
        for path in (first, second):
            for dtype in (torch.float16, BFLOAT16):
                check(path, dtype)
    assert len(set(conversions)) == len(conversions) == 4
    link = tmp_path / "link.gguf"
    link.symlink_to(first)
    check(link)
    assert len(conversions) == 4


def test_names_that_are_no_text(tmp_path: Path, folder: Path, conversions: list[Path]) -> None:
    path = gguf(tmp_path).rename(tmp_path / os.fsdecode(b"\xff.gguf"))
    check(path)
    check(path)
    assert len(conversions) == 1


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "foreign": lambda content: b"x" * 5000,
    "cut in the header": lambda content: content[:100],
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "older format": lambda content: content.replace(b'"format": "1"', b'"format": "0"'),
    "no metadata": lambda content: content.replace(b"__metadata__", b"__metadatA__"),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_entry_is_made_again(
    tmp_path: Path, folder: Path, conversions: list[Path], spoil: Callable[[bytes], bytes]
) -> None:
    path = gguf(tmp_path)
    entry = fill(path)
    whole = entry.read_bytes()
    entry.write_bytes(spoil(whole))
    assert entry.read_bytes() != whole
    check(path)
    assert entry.read_bytes() == whole
    assert conversions == [entry] * 2


@pytest.mark.parametrize("other", ["dtype", "file"])
def test_an_entry_of_something_else_is_not_used(tmp_path: Path, folder: Path, other: str) -> None:
    path = gguf(tmp_path)
    entry = fill(path)
    wrong = fill(path, torch.float16) if other == "dtype" else fill(gguf(tmp_path, tied=True, name="y.gguf"))
    shutil.copy(wrong, entry)
    check(path)


def test_flipped_bits(tmp_path: Path, folder: Path) -> None:
    """Anywhere in an entry: it is made again at once, or by the load after the one that came across the bit."""
    path = gguf(tmp_path)
    entry = fill(path)
    whole = entry.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    generator = torch.Generator().manual_seed(0)
    bits = [
        torch.randint(low * 8, high * 8, (40,), generator=generator) for low, high in ((0, data), (data, len(whole)))
    ]
    for bit in torch.cat(bits).tolist():
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        entry.write_bytes(content)
        if bit < data * 8:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "[^:]*: damaged cache entry")  # when it is in a checksum
                check(path)
        else:
            with pytest.warns(UserWarning, match=f"^{entry}: damaged cache entry; {path} is read instead$") as caught:
                check(path)
            assert len(caught) == 1
            assert not entry.exists()
        check(path)
        assert entry.read_bytes() == whole


def test_a_dtype_that_is_not_the_one_asked_for(tmp_path: Path, folder: Path) -> None:
    """The same bytes, metadata and checksums, but they mean other numbers."""
    path = gguf(tmp_path)
    entry = fill(path)
    entry.write_bytes(entry.read_bytes().replace(b'{"dtype": "BF16"', b'{"dtype": "F16" '))
    with pytest.warns(UserWarning, match="damaged cache entry"):
        check(path)


@pytest.mark.parametrize("length", range(1, 10))
def test_every_byte_is_in_the_checksum(length: int) -> None:
    seen = {gguf_cache._checksum(torch.zeros(length, dtype=BFLOAT16))}
    for place in range(2 * length):
        raw = torch.zeros(2 * length, dtype=torch.uint8)
        raw[place] = 1 + place  # positions count within a word only
        seen.add(gguf_cache._checksum(raw.view(BFLOAT16)))
    assert len(seen) == 2 * length + 1


@pytest.mark.parametrize("spoil", [Path.unlink, lambda entry: os.truncate(entry, 3000)], ids=["removed", "truncated"])
def test_an_entry_that_vanishes_once_open(tmp_path: Path, folder: Path, spoil: Callable[[Path], None]) -> None:
    path = gguf(tmp_path)
    with open_checkpoint(path) as checkpoint, converted(checkpoint, BFLOAT16) as cached:
        spoil(next(folder.iterdir()))
        with pytest.warns(UserWarning, match="damaged cache entry"):
            assert_same(weights(cached), weights(checkpoint))
    check(path)


def test_errors_about_tensors_name_the_entry(tmp_path: Path, folder: Path) -> None:
    model = family_model("llama")
    model.model.norm.weight.data[0] = 1e6
    path = write_gguf(tmp_path / "x.gguf", model, ["Q8_0"])
    entry = fill(path)
    with (
        open_checkpoint(path) as checkpoint,
        converted(checkpoint, BFLOAT16) as cached,
        pytest.raises(InvalidInput, match=f"^{entry}: tensor model.norm.weight holds .* as float16$"),
    ):
        cached.tensor("model.norm.weight", torch.float16)
