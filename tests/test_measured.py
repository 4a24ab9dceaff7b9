"""The figures in the README are those that are stored."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from report import NO_GPU, RESULTS, section

ROOT = Path(__file__).parent.parent


def test_readme_says_what_was_measured() -> None:
    subprocess.run([sys.executable, str(ROOT / "perf" / "report.py"), "--check"], check=True)


def test_what_a_gpu_check_kept_goes_into_the_section(tmp_path: Path) -> None:
    """Until there is such a file the section says that there is none."""
    for path in RESULTS.glob("*.json"):
        if not path.name.startswith("gpu-"):
            shutil.copy(path, tmp_path)
    words = NO_GPU.split()
    assert section(tmp_path).split()[-len(words) :] == words
    machine = {"device": "GPU of a test", "torch": "2", "triton": "3", "cuda": "13", "date": "2026-01-02 03:04 UTC"}
    checks = [
        {"name": "laws/verify", "status": "ok", "key": "p = 0.4"},
        {"name": "times/verify-6", "status": "ok", "key": "9.5 us"},
        {"name": "speed/Qwen3-8B/plain", "status": "absent", "key": ""},
    ]
    (tmp_path / "gpu-of-a-test.json").write_text(json.dumps({"machine": machine, "checks": checks}))
    text = section(tmp_path)
    assert "Not measured" not in text
    assert "GPU of a test (`tools/gpu_check.py`): 2 of 3 checks passed;" in text
    assert text.endswith("|---|---|\n| times/verify-6 | 9.5 us |\n| speed/Qwen3-8B/plain | absent |\n")
