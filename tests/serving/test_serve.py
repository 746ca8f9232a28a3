"""`insitu serve` as a person runs it: a process, a call by hand, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.cli import main

SOURCE = str(Path(insitu.__file__).parents[1])


@contextmanager
def serving(*arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "insitu", "serve", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, **env},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def call(url: str, body: object, secret: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {secret}"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def forget(url: str, secret: str) -> None:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {secret}"}, method="DELETE")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


@pytest.mark.slow
def test_serve_from_start_to_ctrl_c(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "submit", "parameters": {"type": "object"}}]')
    arguments = ["--json", "--admin", "--agent", "codex", f"run.dir={run}", "--sessions", "2"]
    arguments += ["--tools", str(tools)]
    arguments += ["model.max_context_tokens=1024"]
    with serving(*arguments, "limits.max_call_tokens=8", INSITU_ADMIN_SECRET="operator-" * 4) as process:
        assert process.stdout is not None
        events: dict[str, list[dict[str, Any]]] = {}
        while "admin" not in events:
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            event = json.loads(line)
            events.setdefault(event["event"], []).append(event)
        session = events["session"][0]
        assert list(session["agents"]) == ["codex"]
        assert "the 1,024 served" in session["agents"]["codex"]["note"]
        assert "can serve pi;" in events["note"][0]["line"]
        body = {"messages": [{"role": "user", "content": "Hello."}]}
        status, reply = call(f"{session['address']}/v1/chat/completions", body, session["secret"])
        assert status == 200
        assert reply["usage"]["completion_tokens"] <= 8
        assert call(f"{session['address']}/v1/chat/completions", body, "wrong")[0] == 401
        tool_url = f"{session['address']}/v1/tools/submit"
        assert call(tool_url, {"sure": 0.123, "x": "\ud800"}, session["tool_secret"]) == (200, {"ok": True})
        admin = events["admin"][0]
        assert admin["secret"] == "operator-" * 4
        report = json.loads(process.stdout.readline())
        assert report["event"] == "call"
        assert report["sampled_tokens"] == reply["usage"]["completion_tokens"]
        assert report["drift"] == "clean first"
        told_too = json.loads(process.stdout.readline())
        assert (told_too["event"], told_too["outcome"], told_too["turn"]) == ("call", "unauthorized", -1)
        heard = json.loads(process.stdout.readline())
        assert (heard["event"], heard["name"], heard["source"]) == ("host_call", "submit", "agent")
        (line,) = (run / "host_calls.jsonl").read_text().splitlines()
        assert json.loads(line).items() >= {"rollout_id": "serve-0", "attempt": 1, "index": 0}.items()
        assert json.loads(json.loads(line)["arguments"]) == {"sure": 0.123, "x": "\ufffd"}
        named = []
        for name in ("../mine", "sealed", "deleted"):
            status, opened = call(f"{admin['origin']}/sessions", {"rollout_id": name}, admin["secret"])
            assert status < 300, opened
            named.append(opened["public_id"])
        sealing = f"{admin['origin']}/sessions/{named[1]}/seal"
        assert call(sealing, {"reward": 0.5}, admin["secret"])[0] == 200
        forget(f"{admin['origin']}/sessions/{named[2]}", admin["secret"])
        assert sorted(file.suffix for file in (run / "sessions").iterdir()) == [".log"] * 3
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        rest = [json.loads(line) for line in out.splitlines()]
        assert [event["event"] for event in rest] == ["sealed"] * 4 + ["end"]
        assert [event["rollout_id"] for event in rest[:4]] == ["sealed", "serve-0", "serve-1", "../mine"]
        assert not list((run / "sessions").glob("*.log")), "nothing is left to recover"
        assert rest[1]["captured"] == rest[1]["trained"] == report["sampled_tokens"]
        assert rest[2]["captured"] == 0
    assert json.loads((run / "summary.json").read_text())["rewards"]["sealed"] == [0.5]
    first = insitu.open_run(run).rollout("serve-0")
    assert first.tokens().mask.sum() == report["sampled_tokens"]


def test_what_a_person_gets_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "reset", "parameters": {"type": "object"}}]')
    for arguments, word in (
        (["--tools", str(tools)], "'reset'"),
        (["--tools", "/nonexistent.json"], "cannot read /nonexistent.json"),
        (["--agent", "emacs"], "no agent 'emacs'"),
        (["gateway.listne=1"], "did you mean gateway.listen"),
        (["model.path=/nonexistent"], "model.path"),
        (["gateway.listen=70000"], "gateway.listen: is neither HOST:PORT nor a port"),
        (["--sessions", "0"], "sessions"),
    ):
        assert main(["serve", *arguments, f"run.dir={tmp_path / 'run'}"]) == 2
        said = capsys.readouterr()
        assert word in said.err
        assert said.out == ""
        assert said.err.count("\n") == 1


@pytest.mark.slow
def test_the_configured_family_is_the_one_that_is_served(tmp_path: Path) -> None:
    with serving(f"run.dir={tmp_path / 'run'}", "model.renderer=nonesuch") as process:
        _, stderr = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "nonesuch" in stderr


@pytest.mark.slow
def test_what_a_person_reads_is_short_and_explained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ["model.max_context_tokens=1024", "limits.max_call_tokens=8"]
    with serving(f"run.dir={run}", *small) as process:
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("Serving"):
            lines.append(process.stdout.readline().rstrip("\n"))
            assert lines[-1] or len(lines) < 40, process.stderr and process.stderr.read()
        assert len(lines) < 20
        text = "\n".join(lines)
        assert "will not work" not in text
        for word in ("clean", "edited", "fork", "new_root", "auxiliary"):
            assert word in text
        (base,) = [line.split()[1] for line in lines if line.strip().startswith("OpenAI")]
        (key,) = [line.split()[1] for line in lines if line.strip().startswith("key")]
        status, _ = call(f"{base}/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]}, key)
        assert status == 200
        (script,) = (run / "agents" / "serve-0").iterdir()
        assert script.name == "pi.sh"
        assert script.stat().st_mode & 0o777 == 0o600
        assert f"{script.parent}/NAME.sh" in text
        assert key not in " ".join(str(path) for path in run.rglob("*"))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
