"""Shell completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from insitu import cli


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ([], "train"),
        (["tasks"], "validate"),
        (["init", "--engine"], "vllm"),
        (["demo"], "--from-scratch"),
        (["train", "my.toml"], "train.lr="),
    ],
)
def test_what_may_follow_is_printed(
    words: list[str], some: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INSITU_COMPLETE", "1")
    with pytest.raises(SystemExit) as done:
        cli.main(words)
    assert done.value.code == 0
    assert some in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_bash_completes_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    insitu = tmp_path / "insitu"
    insitu.write_text(f'#!/bin/sh\nexec {sys.executable} -m insitu "$@"\n')
    insitu.chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    asked = 'COMP_WORDS=(insitu tasks va); COMP_CWORD=2; _insitu insitu va tasks; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        [bash, "-c", f"{script}\n{asked}"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "validate\n", done.stderr
