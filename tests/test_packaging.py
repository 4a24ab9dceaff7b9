"""Guards of the layout: links, names of packages, direction of imports, what a wheel holds, length of files.

kernels/ and models/ live at the root and are imported through links in fused_spec/. A top-level package called kernels
would collide with Hugging Face's, so nothing may be importable, or shipped, under that name.
"""

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fused_spec", "kernels", "models", "tests", "perf", "tools")
LINKED = ("kernels", "models")
MAX_LINES = 400  # 300 is what to aim for

# Who may import what of ours. A name covers the modules below it.
ALLOWED = {
    "fused_spec.errors": (),
    "fused_spec.rules": ("fused_spec.rules", "fused_spec.errors"),
    "fused_spec.kernels": ("fused_spec.kernels", "fused_spec.rules", "fused_spec.errors"),
    "fused_spec.models": ("fused_spec.models", "fused_spec.kernels", "fused_spec.errors"),
}
MAY_IMPORT_CLI = ("fused_spec.cli", "fused_spec.__main__", "tests.test_cli")


def module_name(path: Path) -> str:
    """The dotted name under which a file of the tree is imported: kernels/x.py is fused_spec.kernels.x."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in LINKED:
        parts = ("fused_spec", *parts)
    return ".".join(parts)


def source_files() -> list[Path]:
    """Every Python file once: os.walk does not follow the links."""
    found = []
    for folder in FOLDERS:
        for directory, _, names in os.walk(ROOT / folder):
            found += [Path(directory) / name for name in names if name.endswith(".py")]
    return sorted(found)


def imported_names(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, those inside functions and `if TYPE_CHECKING` included.

    `from a import b` gives a.b, since b may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.removesuffix(".__init__").split(".")
            climb = node.level - module.endswith(".__init__")  # a package's own file is already one level up
            base = package[: len(package) - climb] if node.level else []
            base = [*base, node.module] if node.module else base
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def violations(source: str, module: str) -> list[str]:
    """What is wrong with the imports of one file, a line each."""
    allowed = next((names for room, names in ALLOWED.items() if within(module, (room,))), None)
    wrong = []
    for line, name in imported_names(source, module):
        where = f"{module}:{line}: imports {name}"
        if within(name, LINKED):
            wrong.append(f"{where}; write fused_spec.{name}")
        if within(name, ("fused_spec.cli",)) and not module.startswith(MAY_IMPORT_CLI):
            wrong.append(f"{where}; nothing imports the command line")
        if allowed is not None and within(name, ("fused_spec",)) and not within(name, allowed):
            wrong.append(f"{where}; of ours it may import {', '.join(allowed) or 'nothing'}")
    return wrong


def git(*arguments: str) -> str:
    """Output of a git command in the checkout; skips where there is no checkout to ask."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    answer = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if answer.returncode:
        pytest.skip(f"git cannot read this checkout: {answer.stderr.strip()}")
    return answer.stdout


@pytest.mark.parametrize("name", LINKED)
def test_package_folder_is_a_link_to_the_root_folder(name: str) -> None:
    link = ROOT / "fused_spec" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name).is_dir()
    assert not (ROOT / name / "__init__.py").exists()


@pytest.mark.parametrize("name", LINKED)
def test_link_is_committed_as_a_link(name: str) -> None:
    entries = git("ls-files", "--stage", "--", f"fused_spec/{name}").splitlines()
    if not entries:
        pytest.skip("not in the index yet")
    assert [entry.split()[0] for entry in entries] == ["120000"]


@pytest.mark.parametrize("name", LINKED)
def test_installation_offers_no_top_level_package(name: str, tmp_path: Path) -> None:
    """An editable install must not make root folders importable: transformers would pick up ours for kernels."""
    lines = (
        "from importlib.util import find_spec as f\n"
        "ours, other = f('fused_spec'), f(NAME)\n"
        "print(ours.origin if ours else '')\n"
        "print(*((other.submodule_search_locations or [other.origin]) if other else []))"
    ).replace("NAME", repr(name))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    answer = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    package, _, found = answer.stdout.partition("\n")
    installed = "fused_spec is not installed from this checkout: pip install -e ."
    assert package == str(ROOT / "fused_spec" / "__init__.py"), installed
    assert str(ROOT / name) not in found


def test_imports_keep_their_direction() -> None:
    wrong = [line for path in source_files() for line in violations(path.read_text("utf-8"), module_name(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "caught"),
    [
        ("tests.test_x", "import kernels", True),
        ("fused_spec.engine", "def f():\n    from models.config import Config", True),
        ("fused_spec.engine", "from .kernels import verify", False),
        ("fused_spec.__init__", "from . import cli", True),
        ("fused_spec.__init__", "from .engine import Engine", False),
        ("fused_spec.__main__", "from .cli import main", False),
        ("fused_spec.engine", "from fused_spec.cli import main", True),
        ("tests.test_cli", "from fused_spec import cli", False),
        ("fused_spec.kernels.verify", "from .philox import uniform", False),
        ("fused_spec.kernels.verify", "from ..models.config import Config", True),
        ("fused_spec.kernels.verify", "from fused_spec import models", True),
        ("fused_spec.kernels.verify", "import fused_spec", True),
        ("fused_spec.kernels.verify", "from fused_spec.rules import Rule", False),
        ("fused_spec.models.llama", "from fused_spec.rules import Rule", True),
        ("fused_spec.models.llama", "from fused_spec.kernels.sample import sample", False),
        ("fused_spec.rules", "from .errors import InvalidInput", False),
        ("fused_spec.rules", "from .kernels.sample import sample", True),
        ("fused_spec.errors", "from . import rules", True),
    ],
)
def test_the_import_guard_itself(module: str, source: str, caught: bool) -> None:
    assert bool(violations(source, module)) == caught


def test_files_stay_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in source_files()}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Names in a wheel and in an sdist, built from a copy of the tree by this environment's setuptools, offline."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        if (ROOT / folder).exists():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    lines = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    answer = subprocess.run([sys.executable, "-c", lines], cwd=tree, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = opened.namelist()
    with tarfile.open(sdist) as opened:
        in_sdist = [member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()]
    return in_wheel, in_sdist


def test_wheel_and_sdist_hold_every_module(archives: tuple[list[str], list[str]]) -> None:
    wanted = {
        module_name(path).replace(".", "/") + ".py"
        for path in source_files()
        if module_name(path).startswith("fused_spec.")
    }
    assert wanted
    for names in archives:
        assert {name for name in names if name.startswith("fused_spec/") and name.endswith(".py")} == wanted


def test_wheel_and_sdist_hold_no_second_top_level_package(archives: tuple[list[str], list[str]]) -> None:
    in_wheel, in_sdist = archives
    tops = {name.partition("/")[0] for name in in_wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fused_spec"}
    assert not [name for name in in_sdist if name.startswith(("kernels/", "models/"))]
