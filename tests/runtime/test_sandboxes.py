"""Which sandboxes a configuration gives, and what is refused because no sandbox of a backend could hold
it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.config import Config, load_config
from insitu.errors import ConfigError
from insitu.runtime.preflight import _check_needs, open_mix, prepare
from insitu.runtime.sandboxes import UNSUPPORTED, check_tasks, make_backend

FAKE = "sandbox.environment=tests.fakes.harbor:local_environment"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "harbor"])
def test_the_table_says_what_the_backend_says_of_itself(kind: str) -> None:
    config = load_config(None, [f"sandbox.backend={kind}", *([FAKE] if kind == "harbor" else [])])
    capabilities = make_backend(config).capabilities
    asked_for = {"gateway_only", "binds", "images", "root_setup", "roots", "container"}
    assert asked_for - capabilities == set(UNSUPPORTED[kind])


@pytest.mark.slow
def test_a_program_that_this_machine_lacks_is_refused_before_the_run(tmp_path: Path) -> None:
    command = "cd . && FLAG=1 no-such-program --all x.py 2>&1"
    row = {"checks": [{"command": "python3 a.py"}, {"command": command}]}
    config = write_rows(tmp_path, [CASES, row])
    with pytest.raises(ConfigError) as raised:
        prepare(config, print, lambda _config, mix: mix.examples())
    assert str(raised.value) == (
        "task t1 cannot run with sandbox.backend = local: its checks call no-such-program, which is not"
        " installed for all users of this machine"
    )
    for change in ({"image": "debian:12"}, {"setup": ["make it"]}):
        there = write_rows(tmp_path, [row | change], "sandbox.backend=docker", "sandbox.image=debian:12")
        _check_needs(mix := open_mix(there), mix.examples())


CASES = {"entry": "a.py", "cases": [{"function": "f", "args": [], "expected": 2}]}
TESTS = {"fail_to_pass": ["test_a.py::test_a"], "tests": {"test_a.py": "def test_a(): assert 0\n"}}


def write_rows(tmp_path: Path, rows: list[dict[str, object]], *overrides: str) -> Config:
    """Return the configuration of a data set of these rows."""
    path = tmp_path / "rows.jsonl"
    plain = {"prompt": "Fix it.", "files": {"a.py": "def f(): return 1\n"}}
    path.write_text("".join(json.dumps(plain | {"id": f"t{n}"} | row) + "\n" for n, row in enumerate(rows)))
    return load_config(None, ["tasks.source=jsonl", f"tasks.path={path}", *overrides])


def refused(tmp_path: Path, rows: list[dict[str, object]], *overrides: str) -> str:
    """What is said of a data set of these rows."""
    config = write_rows(tmp_path, rows, *overrides)
    try:
        check_tasks(config, open_mix(config).examples())
    except ConfigError as error:
        return str(error)
    return ""


def test_what_the_tasks_need_a_fall_back_must_have_too(tmp_path: Path) -> None:
    made = [CASES, CASES | {"prompt": "More.", "image": "python:3.12"}]
    docker = ("sandbox.backend=docker", "sandbox.image=python:3.12")
    assert refused(tmp_path, made, *docker) == ""
    assert refused(tmp_path, made, *docker, "sandbox.fallback=local") == (
        "task t1 cannot run with sandbox.fallback = local: its image is python:3.12, and it cannot run images"
    )
    assert refused(tmp_path, made).startswith("task t1 cannot run with sandbox.backend = local: ")
    assert refused(tmp_path, made[:1], *docker, "sandbox.fallback=local") == ""


def test_runners_that_show_a_folder_are_not_for_harbor(tmp_path: Path) -> None:
    harbor = ("sandbox.backend=harbor", FAKE, "sandbox.image=python:3.12")
    assert refused(tmp_path, [CASES], *harbor) == ""
    assert "task t0 cannot run with sandbox.backend = harbor: runner pytest" in refused(
        tmp_path, [TESTS], *harbor
    )
    assert refused(tmp_path, [TESTS]) == ""


def test_root_that_no_sandbox_has_is_refused_before_the_run(tmp_path: Path) -> None:
    row = CASES | {"image": "debian:12", "root_setup": ["chown 0 /srv"]}
    harbor = ["sandbox.backend=harbor", "sandbox.environment=e2b"]
    assert "it has root_commands, and it runs no commands as root" in refused(tmp_path, [row], *harbor)
    assert refused(tmp_path, [row], "sandbox.backend=docker") == ""
