"""`insitu attack` in docker sandboxes: attacks of every class, with their twins and the careless grader."""

from __future__ import annotations

import json

import pytest

from insitu.cli import main

pytestmark = pytest.mark.full
SOME = {"json_io": (15, "1,4,10,13,21,22,28,33,38-43,45"), "pytest": (6, "1,10,13,21,33,41")}
"""How many, and which: of each class. Those on processes, the network, secrets and hogs are where the kind of
sandbox matters; under pytest an attack takes half a minute."""


@pytest.mark.parametrize("runner", SOME)
def test_the_attacks_are_defeated_in_docker_sandboxes(
    runner: str, docker_image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sandboxes = ["sandbox.backend=docker", f"sandbox.image={docker_image}"]
    count, numbers = SOME[runner]
    ended = main(["attack", "--only", numbers, "--runner", runner, "--json", *sandboxes])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (ended, said["failed"]) == (0, [])
    assert said["defeated"] == said["attacks"] == count
    assert said["twins_ok"] == said["twins"] > count
