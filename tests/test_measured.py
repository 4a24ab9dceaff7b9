"""The figures in the README are those that are stored."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_readme_says_what_was_measured() -> None:
    subprocess.run([sys.executable, str(ROOT / "perf" / "report.py"), "--check"], check=True)
