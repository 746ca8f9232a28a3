"""An unlisted skip fails the suite, so that a missing oracle cannot go unseen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("body", "strict", "code"),
    [
        ("pytest.importorskip('no_such_package')", "1", 1),
        ("pytest.importorskip('no_such_package')", "", 0),
        ("def test_two(): pytest.skip('the namespaces mode needs root')", "1", 0),
        ("def test_two(): pytest.skip('no time today')", "1", 1),
        ("def test_two(): assert False", "1", 1),
    ],
)
def test_only_listed_skips_pass(tmp_path: Path, body: str, strict: str, code: int) -> None:
    for name in ("conftest.py", "fast.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    (tmp_path / "test_two.py").write_text(f"import pytest\n{body}\n")
    own = {"INSITU_KNOWN_SKIPS_ONLY": strict, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env = {name: text for name, text in os.environ.items() if name != "INSITU_FULL_BUDGET_S"} | own
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "."],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert ("unexpected skip: test_two.py" in done.stdout) == (code == 1 and "assert" not in body)
