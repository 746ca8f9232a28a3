"""Skills for coding agents: where each agent looks, and every command in them exists with its options."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from run_lab import make_run

from insitu.cli import main
from insitu.cli.options import parse
from insitu.config import Config, tables_of
from insitu_view.skills import AGENTS, skill_texts, write_skills

Capture = pytest.CaptureFixture[str]
TEXTS = skill_texts()


def commands(text: str) -> list[list[str]]:
    """The insitu commands of a skill, in fences and in lines, without redirections."""
    fenced = [
        line.strip()
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.split("\n")
    ]
    inline = re.findall(r"`(insitu [^`]+)`", text)
    found = []
    for line in filter(None, [*fenced, *inline]):
        words = shlex.split(line.removeprefix("nohup ").partition(" > ")[0])
        assert words[0] == "insitu", line
        found.append(words[1:])
    return found


def test_there_are_the_five_skills_and_each_says_when_to_use_it() -> None:
    assert list(TEXTS) == [f"insitu-{name}" for name in ("check", "compare", "start", "watch", "why-flat")]
    for name, text in TEXTS.items():
        head = yaml.safe_load(text.split("---\n")[1])
        assert head["name"] == name
        assert 80 < len(head["description"]) < 400
        assert "Use " in head["description"]
        assert set(re.findall(r"`(insitu-[a-z-]+)`", text)) <= TEXTS.keys()
        assert len(commands(text)) >= 4


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_exists_with_its_options(name: str, capsys: Capture) -> None:
    for words in commands(TEXTS[name]):
        try:
            parse(words)
        except SystemExit:
            pytest.fail(f"insitu {shlex.join(words)}: {capsys.readouterr().err}")


@pytest.mark.parametrize("name", TEXTS)
def test_every_key_exists(name: str) -> None:
    known = {table: set(values.__dict__) for table, values in tables_of(Config())}
    for table, key in re.findall(r"(?<![\w/])([a-z]+)\.([a-z_]+)\b(?!\.)", TEXTS[name]):
        assert key == "jsonl" or key in known.get(table, {key}), f"{table}.{key}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["insitu-watch", "insitu-why-flat", "insitu-compare"])
def test_commands_that_look_at_a_run_work_on_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    make_run(tmp_path / "runs" / "first")
    for run in ("a", "b"):
        (tmp_path / "runs" / run).symlink_to(tmp_path / "runs" / "first")
    tried = 0
    for words in commands(TEXTS[name]):
        if words[0] in ("runs", "digest", "query", "compare", "show"):
            assert main(words) == 0, words
            assert capsys.readouterr().out or words[0] == "query", words
            tried += 1
    assert tried >= 4


@pytest.mark.parametrize("agent", AGENTS)
def test_they_are_written_where_the_agent_looks(agent: str, tmp_path: Path, capsys: Capture) -> None:
    verb = ["skills", str(tmp_path), "--for", agent, "--json"]
    assert main(verb) == 0
    written = [Path(path) for path in json.loads(capsys.readouterr().out)["written"]]
    assert written == [tmp_path / AGENTS[agent] / name / "SKILL.md" for name in TEXTS]
    assert [path.read_text() for path in written] == list(TEXTS.values())
    assert main(verb) == 0  # the same again changes nothing
    capsys.readouterr()
    written[0].write_text("my own")
    assert main(verb) == 2
    assert "was changed, or is of another version: --force replaces it" in capsys.readouterr().err
    assert written[0].read_text() == "my own"
    assert main([*verb, "--force"]) == 0
    assert written[0].read_text() != "my own"


def test_bad_names_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    for words in (["--for", "emacs"], [str(tmp_path / "none")]):
        assert main(["skills", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert len(write_skills(tmp_path, [])) == 3 * len(TEXTS)
