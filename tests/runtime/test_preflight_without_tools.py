"""A model whose template takes no tools is refused for agents that offer some, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from render_families import write_renderer

from insitu import cli
from insitu.config import load_config
from insitu.errors import ConfigError
from insitu.runtime.preflight import check_rendering

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_renderer(tmp_path / "model", TEMPLATE)


@pytest.mark.parametrize("agent", ["single_turn", "terminus"])
def test_agents_without_tools_are_served(agent: str, model: Path) -> None:
    config = load_config(None, [f"model.path={model}", f"harness.agent={agent}"])
    renderer = check_rendering(config)
    assert renderer is not None
    assert not renderer.caps.tools


@pytest.mark.parametrize("agent", ["pi", "script", "mini_swe", "claude_code"])
def test_agents_with_tools_are_refused(agent: str, model: Path) -> None:
    config = load_config(None, [f"model.path={model}", f"harness.agent={agent}"])
    line = (
        rf"harness.agent {agent} offers tools: this model takes none: its chat template leaves out .*; use an"
    )
    with pytest.raises(ConfigError, match=line):
        check_rendering(config)


def test_only_the_agents_of_a_task_set_count(model: Path) -> None:
    agents = {name: {"agent": name} for name in ("single_turn", "terminus", "pi")}
    tasks = [
        {"name": "a", "source": "toy", "harness": agents["single_turn"]},
        {"name": "b", "source": "toy", "agents": [agents["terminus"], agents["pi"]]},
    ]
    base = {"model": {"path": str(model)}, "tasks": tasks}
    with pytest.raises(ConfigError, match=r"tasks.b.*: harness.agent pi offers tools"):
        check_rendering(load_config(None, [], base))
    tasks[1]["agents"] = [agents["terminus"], agents["single_turn"]]
    assert check_rendering(load_config(None, [], base)) is not None


@pytest.mark.parametrize("verb", ["train", "rollout"])
def test_a_dry_run_says_it(
    verb: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text('[harness]\nagent = "script"\n')
    code = cli.main([verb, str(tmp_path / "c.toml"), "--dry-run", f"model.path={model}"])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert said.err.startswith("insitu: harness.agent script offers tools: this model takes none: ")
    assert said.err.count("\n") == 1


def test_a_dry_run_without_the_model_at_hand_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rollout", "--dry-run", f"model.path={tmp_path / 'later'}"]) == 0
    assert json.dumps(str(tmp_path / "later")) in capsys.readouterr().out
