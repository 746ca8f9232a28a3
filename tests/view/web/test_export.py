"""An exported report: what is in the file, what is left out, and what stops it."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import zlib
from pathlib import Path
from typing import Any

import pytest
from run_lab import make_run

from insitu.errors import ConfigError, SetupError
from insitu_view.web.bundle import bundle
from insitu_view.web.export import export


def write(run: Path, file: Path, **options: Any) -> str:
    given = {"rollouts": "", "redact": [], "tokens": True, "checks": False, "max_mib": 25, **options}
    out = io.StringIO()
    export([run], file, out, **given)
    return out.getvalue()


def answers(file: Path) -> dict[str, bytes]:
    """Return path and parameters -> the answer in the file."""
    packs = re.findall(r'<script type="application/octet-stream" class="pack">([^<]*)<', file.read_text())
    index, *rest = [zlib.decompress(base64.b64decode(pack)) for pack in packs]
    return {key: rest[n][at : at + size] for key, (n, at, size) in json.loads(index).items()}


@pytest.mark.slow
def test_a_file_holds_the_pages_and_the_telling_rollouts(lab_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    said = write(lab_run, file)
    held = answers(file)
    whole = {key.split("id=")[1] for key in held if key.startswith("lab\nrollout\n")}
    assert 8 <= len(whole) < 56
    assert f"{len(whole)} of 56 rollouts are here whole" in said
    assert {"runs", "lab\noverview", "lab\nrollouts", "lab\ntasks", "lab\nhealth", "lab\ncheats"} <= set(held)
    assert len(json.loads(held["lab\nrollouts"])["rows"]) == 56
    assert any(key.startswith("compare\nid_a=") for key in held)
    assert any(key.startswith("lab\ntokens\n") for key in held)
    assert not any(str(lab_run).encode() in answer for answer in held.values())


@pytest.mark.full
def test_failing_checks_are_left_out_unless_asked_for(lab_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    assert "failing checks of" in write(lab_run, file, rollouts="all", tokens=False)
    without = b"\n".join(answers(file).values())
    assert "failing checks of" not in write(lab_run, file, rollouts="all", tokens=False, checks=True)
    assert b'"expected"' in b"\n".join(answers(file).values())
    assert b'"expected"' not in without
    assert "tokens are left out" in file.read_text()


def test_secrets_home_and_host_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer-7")
    run = make_run(tmp_path / "lab", steps=1)
    secret = "s" * 43
    (run / "logs/insitu.log").write_text(
        f"{Path.home()}/x /home/somebody/y {socket.gethostname()} {secret} sk-abcdefghijklmnopqrstu ACME-17"
    )
    file = tmp_path / "report.html"
    write(run, file, redact=[r"ACME-\d+"], rollouts="1")
    text = json.loads(answers(file)["lab\nrun_log"])["text"]
    assert text == "~/x ~/y HOST *** *** ***"


def test_tokens_that_hold_what_is_redacted_are_left_out(lab_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    said = write(lab_run, file, rollouts="2", redact=["a"])
    assert "tokens of 2 rollouts are left out" in said
    assert not any("\ntokens\n" in key for key in answers(file))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_mib": 0}, "more than --max-mib 0: choose fewer --rollouts, or add --no-tokens"),
        ({"rollouts": "train/9"}, "--rollouts: the run has no rollout train/9"),
        ({"redact": ["("]}, r"--redact \( is not a regular expression"),
    ],
)
def test_what_cannot_be_exported_gets_one_line(
    lab_run: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    file = tmp_path / "report.html"
    with pytest.raises(ConfigError, match=message) as caught:
        write(lab_run, file, **options)
    assert "\n" not in str(caught.value)
    assert not file.exists()


def test_a_file_that_cannot_be_written_gets_one_line(lab_run: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"^cannot write .*: Is a directory$"):
        write(lab_run, tmp_path)


def test_several_runs_are_in_one_file_with_their_comparison(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        make_run(tmp_path / "runs" / name, steps=1, train={"lr": 1e-4 * (1 + seed)})
    file = tmp_path / "report.html"
    said = write(tmp_path / "runs", file, tokens=False)
    held = answers(file)
    assert {"a\noverview", "b\noverview", "compare"} <= set(held)
    assert any("runs=a,b" in key for key in held)
    assert any("runs=b,a" in key for key in held)
    assert {row["key"] for row in json.loads(held["compare"])["differences"]} == {"train.lr"}
    whole = sum(key.split("\n")[1:2] == ["rollout"] for key in held)
    assert f"{whole} of 48 rollouts are here whole" in said


def test_ids_name_rollouts_of_one_run(lab_run: Path, hostile_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--rollouts with ids takes one run, and there are 2"):
        export(
            [lab_run, hostile_run], tmp_path / "x", io.StringIO(), rollouts="train/1", redact=[], tokens=True,
            checks=False, max_mib=25,
        )  # fmt: skip


@pytest.mark.slow
def test_no_text_ends_the_script(hostile_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write(hostile_run, file)
    assert "</script" not in bundle().lower()
    assert "<!--" not in bundle()
    assert "<img src=x" not in file.read_text()
