"""What is read and printed where the locale knows ASCII only: UTF-8 files, escapes, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from insitu import cli
from insitu.config import load_config
from insitu.storage.run_dir import RunDir

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp1252"}


def insitu(*argv: str) -> subprocess.CompletedProcess[str]:
    source = {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command = [sys.executable, "-m", "insitu", *argv]
    return subprocess.run(
        command,
        capture_output=True,
        encoding="cp1252",
        timeout=60,
        env=os.environ | source | ASCII,
        check=False,
    )


@pytest.mark.slow
def test_a_configuration_with_other_letters_is_read_and_shown(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('# a dash \u2014 here\n[run]\ndir = "runs/\u8ab2\u984c"\n', encoding="utf-8")
    done = insitu("train", str(file), "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"runs/\u8ab2\u984c" in done.stdout


@pytest.mark.slow
def test_runs_and_errors_with_other_letters_are_lines(tmp_path: Path) -> None:
    with RunDir.create(load_config(None, [f"run.dir={tmp_path / 'r'}"])) as run, run.store():
        pass
    (tmp_path / "r").rename(tmp_path / "l\u00e4ufe-\u2192")
    listed = insitu("runs", str(tmp_path))
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "ufe-" in listed.stdout
    wrong = insitu("train", "run.steps=\u2192")
    assert wrong.returncode != 0
    assert wrong.stderr.startswith("insitu: ")
    assert wrong.stderr.count("\n") == 1
