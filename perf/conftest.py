"""Makes perf/fixtures.py known to pytest. The fixtures are not here since mypy takes one `conftest` per tree."""

from fixtures import *  # noqa: F403
from fixtures import _threads  # noqa: F401 (not exported, but used by itself)
