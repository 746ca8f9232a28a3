"""`pip install insitu` alone: its wheel without torch and without the packages beside the core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from render_families import write_renderer

from insitu.registry import SATELLITES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PIP = {name: f"pip install 'insitu[{name}]'" for name in SATELLITES}
ABSENT = ("insitu", "_insitu", "__editable__", "torch", "safetensors", "transformers", "functorch")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH: the core's wheel, and what is installed here but for `ABSENT`."""
    folder = tmp_path_factory.mktemp("core")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    site = folder / "site"
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(ABSENT) and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return site


def command(environment: Path, *arguments: object) -> tuple[list[str], dict[str, str]]:
    """The command line of the base Python, which has no package of its own but those of `environment`."""
    path = {**os.environ, "PYTHONPATH": str(environment)}
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return [str(base), "-S", "-P", "-m", "insitu", *map(str, arguments)], path


def said(environment: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    argv, path = command(environment, *arguments)
    return subprocess.run(argv, env=path, capture_output=True, text=True, timeout=120, check=False)


def test_a_verb_of_a_package_that_is_not_installed_names_it(environment: Path) -> None:
    for name, own in SATELLITES.items():
        for verb in own.get("verbs", "").split():
            done = said(environment, verb)
            line = f"{verb} is in the package insitu-{name}, which is not installed: {PIP[name]}"
            assert (done.returncode, done.stderr) == (2, f"insitu: {line}\n")


def test_the_doctor_says_which_packages_are_installed(environment: Path) -> None:
    out = said(environment, "doctor").stdout
    assert all(f"insitu-{name}" in out for name in SATELLITES)
    assert out.count("pip install 'insitu[") == len(SATELLITES)
    assert "torch" not in out


def test_a_name_and_a_function_of_another_package_name_it(environment: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    done = said(environment, "rollout", "tasks.source=swe_bench", f"tasks.path={rows}")
    assert done.returncode == 2
    assert "swe_bench is in the package insitu-tasksets, which is not installed" in done.stderr
    rows.write_text(
        json.dumps(
            {
                "id": "one",
                "prompt": "Fix it.",
                "files": {"a.py": "x = 1\n"},
                "tests": {"tests/test_a.py": "from a import x\n\n\ndef test_x():\n    assert x == 2\n"},
                "fail_to_pass": ["tests/test_a.py::test_x"],
            }
        )
    )
    model = write_renderer(tmp_path / "model")
    engine = ("engine.kind=vllm", "engine.urls=http://127.0.0.1:9", f"model.path={model}")
    done = said(environment, "rollout", "tasks.source=jsonl", f"tasks.path={rows}", *engine)
    assert done.returncode == 1
    assert "runner pytest is in the package insitu-tasksets, which is not installed" in done.stderr
    argv, path = command(environment)
    code = "import insitu\ntry: insitu.train\nexcept ImportError as error: print(error)"
    done = subprocess.run([*argv[:3], "-c", code], env=path, capture_output=True, text=True, check=False)
    line = f"insitu.train is in the package insitu-train, which is not installed: {PIP['train']}\n"
    assert (done.stdout, done.stderr) == (line, "")


OWN_ENGINE = """
import json
from contextlib import asynccontextmanager
from pathlib import Path

from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.tasks.toy import ToySource
from insitu.types import Limits, Message, ToolCall
from scripted import ScriptedEngine

source = ToySource(Limits())
known = {problem.prompt: problem for problem in map(source.problem, source.tasks("eval", 0, 2))}

@asynccontextmanager
async def opened(config):
    renderer = template_renderer(read_folder(Path(config.model.path)))

    def policy(ids, key):
        text = renderer.decode(ids)
        found = [problem for prompt, problem in known.items() if prompt in text]
        if not found or key.turn:
            return Message(role="assistant", text="done")
        edits = [{"oldText": found[0].fault.old, "newText": found[0].fault.new}]
        arguments = json.dumps({"path": found[0].path, "edits": edits})
        return Message(role="assistant", tool_calls=(ToolCall(id="", name="edit", arguments=arguments),))

    yield ScriptedEngine(renderer, policy)
"""


def test_a_rollout_is_sampled_and_graded(environment: Path, tmp_path: Path) -> None:
    # The engine of insitu-train for scripts needs the core alone.
    scripted = ROOT / "packages/insitu-train/src/insitu_train/demo/scripted.py"
    (tmp_path / "scripted.py").write_text(scripted.read_text())
    (tmp_path / "mine.py").write_text(OWN_ENGINE)
    settings = (
        f"engine.kind={tmp_path / 'mine.py'}:opened",
        f"model.path={write_renderer(tmp_path / 'model')}",
        *("harness.agent=script", "rollout.count=2", "rollout.samples=1", f"run.dir={tmp_path / 'run'}"),
    )
    done = said(environment, "rollout", "--plain", "--json", *settings)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["graded"], summary["verdict"]["resolved"]) == (2, 2)


def test_a_provider_names_the_package_that_calls_it(environment: Path) -> None:
    done = said(environment, "rollout", "engine.kind=upstream", "engine.model=m", "engine.urls=http://a")
    line = f"upstream is in the package insitu-bridges, which is not installed: {PIP['bridges']}"
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert line in done.stderr
