"""Harbor itself, in a virtual environment of its own: what the adapter relies on is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import insitu

pytestmark = pytest.mark.full
VERSION = "0.24.0"
# Harbor's list of requirements has 24 entries; its environments need these.
NEEDED = (
    "pydantic", "shortuuid", "toml", "pyyaml", "platformdirs", "filelock", "packaging", "pathspec", "jinja2",
    "python-dotenv", "tenacity", "httpx",
)  # fmt: skip

LOOK = """
import inspect, sys, types
from pathlib import Path
from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.factory import EnvironmentFactory
from insitu_fleet import harbor_sdk
from insitu_fleet import harbor
from tests.fakes.harbor import FakeEnvironment

for name in ("start", "stop", "exec", "upload_file", "download_file"):
    real = list(inspect.signature(getattr(BaseEnvironment, name)).parameters)
    ours = list(inspect.signature(getattr(harbor_sdk.Environment, name)).parameters)
    fake = list(inspect.signature(getattr(FakeEnvironment, name)).parameters)
    assert real == ours == fake, (name, real, ours, fake)
    assert inspect.iscoroutinefunction(getattr(BaseEnvironment, name)), name
assert set(harbor_sdk.Result.__annotations__) == set(ExecResult.model_fields), ExecResult.model_fields
assert set(harbor_sdk.Flags.__annotations__) <= set(EnvironmentCapabilities.model_fields)
assert SandboxBuildFailedError.__name__ == "SandboxBuildFailedError"

from insitu.errors import SetupError
try:
    harbor_sdk.of_kind("no-such-cloud")
except SetupError as error:
    assert "known: " in str(error) and "e2b" in str(error), error
else:
    raise SystemExit("an unknown kind was taken")
from insitu.runtime.sandboxes import UNSUPPORTED, make_backend
from insitu.config import load_config
here = ["sandbox.backend=harbor", "sandbox.environment=docker", "sandbox.image=python:3.12"]
backend = make_backend(load_config(None, here))
assert not set(UNSUPPORTED["harbor"]) & backend.capabilities
print(backend.name, *sorted(backend.capabilities))
"""


def works(python: str) -> bool:
    """A version manager's shim may be on the path without a version behind it."""
    return subprocess.run([python, "-c", "0"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = [found for name in ("python3.12", "python3.13") if (found := shutil.which(name))]
    kept = sorted(Path.home().glob(".pyenv/versions/3.1[23]*/bin/python3"))
    base = next((each for each in [*named, *map(str, kept)] if works(each)), None)
    if base is None:
        pytest.skip("harbor: needs Python 3.12")
    folder = tmp_path_factory.mktemp("harbor")
    subprocess.run([base, "-m", "venv", str(folder)], check=True, timeout=300)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ours = project["dependencies"]
    pip = [str(folder / "bin" / "pip"), "install", "-q"]
    for wanted in (
        ["--no-deps", f"harbor=={VERSION}"],
        [*NEEDED, *ours],
    ):
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
    return folder / "bin" / "python"


def test_the_real_interface_is_the_one_that_the_adapter_and_the_fake_have(
    python: Path, tmp_path: Path
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "docker").write_text("#!/bin/sh\nexit 0\n")
    (binaries / "docker").chmod(0o755)
    env = {
        **os.environ,
        "PYTHONPATH": f"{Path(insitu.__file__).parent.parent}{os.pathsep}{Path(__file__).parents[2]}",
    }
    env["PATH"] = f"{binaries}{os.pathsep}{env['PATH']}"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120, check=False
        )

    done = run("-c", LOOK)
    assert done.returncode == 0, done.stderr
    name, *capabilities = done.stdout.split()
    assert name == "harbor:docker"
    assert {"images", "pid_isolation"} <= set(capabilities)
    # Through the command line: Harbor says itself that this environment keeps no sandbox from the network.
    there = ["sandbox.backend=harbor", "sandbox.environment=docker", "sandbox.image=python:3.12"]
    done = run("-m", "insitu", "tasks", "validate", *there, "--limit", "1", "--out", "gate")
    if "network_none" in capabilities:
        assert "sandbox failed" in done.stdout + done.stderr
    else:
        line = "grading needs network_none; harbor:docker has not (sandbox.fallback may)"
        assert done.stderr == f"insitu: {line}\n"
    done = run("-m", "insitu", "tasks", "validate", *there, "sandbox.environment=no-such", "--out", "gate")
    assert "insitu: Harbor has no environment 'no-such' (known: " in done.stderr
