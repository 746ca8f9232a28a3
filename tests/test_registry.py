"""Extensions by built-in name, entry point, dotted path, file and object; reports of broken ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu import registry
from insitu.agents.codex import RECIPE
from insitu.config import load_config
from insitu.doctor import _entry_points
from insitu.errors import ConfigError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `beside` with entry points, on the path of this process."""
    points = {
        "agents": "mine = beside_agents:AGENT\ncodex = beside_agents:AGENT\ntwice = beside_agents:AGENT",
        "rewards": "broken = beside_agents:AGENT.no.such\nlost = beside_lost:judge",
    }
    text = "\n".join(f"[insitu.{kind}]\n{lines}" for kind, lines in points.items())
    for name, entries in (("beside", text), ("other", "[insitu.agents]\ntwice = beside_agents:AGENT")):
        folder = tmp_path / f"{name}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (folder / "entry_points.txt").write_text(entries)
    (tmp_path / "beside_agents.py").write_text("AGENT = ['an agent']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("beside_agents", None)


def test_a_built_in_name_and_an_object_are_found() -> None:
    assert registry.find("agents", "codex") is RECIPE
    assert registry.find("agents", RECIPE) is RECIPE


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_built_in_extension_can_be_imported(kind: registry.Kind) -> None:
    for name in registry.BUILT_IN.get(kind, {}):
        assert registry.find(kind, name) is not None


def test_an_unknown_name_gets_a_hint_and_the_list() -> None:
    with pytest.raises(ConfigError) as raised:
        registry.find("agents", "codxe")
    assert str(raised.value) == (
        "unknown name 'codxe' of kind agents; did you mean codex? known: "
        + ", ".join([*registry.names("agents"), "module:attribute", "file.py:attribute"])
    )


def test_an_entry_point_is_found_and_does_not_replace_a_built_in(installed: Path) -> None:
    assert registry.find("agents", "mine") == ["an agent"]
    assert registry.find("agents", "codex") is RECIPE
    assert load_config(None, ["harness.agent=mine"]).harness.agent == "mine"
    with pytest.raises(ConfigError, match=r"'twice' is declared by beside 1.2 and by other 1.2"):
        registry.find("agents", "twice")
    with pytest.raises(
        ConfigError, match=r"entry point lost of beside 1.2 cannot be imported: ModuleNotFound"
    ):
        registry.find("rewards", "lost")


def test_the_listing_names_broken_entry_points(installed: Path) -> None:
    found = {(row.kind, row.name, row.source): row.error for row in registry.listing()}
    assert found["agents", "mine", "beside 1.2"] == ""
    assert "AttributeError" in found["rewards", "broken", "beside 1.2"]
    assert "built-in" in found["agents", "codex", "beside 1.2"]
    assert "declared by" in found["agents", "twice", "other 1.2"]
    lines = {check.name: check for check in _entry_points()}
    assert (lines["mine"].found, lines["mine"].text) == (True, "agents, from beside 1.2")
    assert not lines["lost"].found
    assert not lines["lost"].needed


def test_a_file_and_a_module_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rewards.py").write_text(
        "import own_neighbour\nclass A:\n    def judge(self):\n        return own_neighbour.ONE\n"
    )
    (tmp_path / "own" / "own_neighbour.py").write_text("ONE = 1\n")
    (tmp_path / "own_module.py").write_text("def judge():\n    return 2\n")
    judge = registry.load("own/rewards.py:A.judge")
    assert judge(None) == 1
    assert registry.load("own/rewards.py:A.judge") is judge
    assert registry.find("rewards", "own_module:judge")() == 2
    for path, error in {
        "own/none.py:judge": "no such file",
        "own_module:none": "has no attribute none",
        "no_such_module:judge": "looked in",
        "judge": "not a path like module:attribute",
        ":judge": "not a path",
    }.items():
        with pytest.raises(ConfigError, match=error):
            registry.load(path)
    (tmp_path / "own_broken.py").write_text("1 / 0\n")
    for path in ("own_broken:judge", "own_broken.py:judge"):
        with pytest.raises(ConfigError, match="cannot import own_broken.*ZeroDivisionError"):
            registry.load(path)


def test_an_object_is_referred_to_by_its_path_if_it_can_be_imported() -> None:
    assert registry.reference("rewards", len) == "builtins:len"
    name = registry.reference("rewards", lambda rollout: 1.0)
    assert name.startswith("object:")
    assert registry.find("rewards", name)(None) == 1.0
    recipe = load_config(None, tables={"harness": {"agent": RECIPE}}).harness.agent
    assert registry.find("agents", recipe) is RECIPE
    with pytest.raises(ConfigError, match="passed as a Python object to another process"):
        registry.find("rewards", "object:gone-0")
