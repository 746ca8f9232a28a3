"""Every recorded session of a real agent, replayed through the gateway: the same forest, to the token."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from recordings_lab import FOLDER, Replay, paths, read, replay, said

from insitu.agents.recipe import shipped_recipes
from insitu.chat.template import TemplateRenderer
from insitu_lab.conformance.agent_tools import AGENT_TOOLS
from insitu_lab.open_renderer import Splitter, open_renderer

FILES = sorted(FOLDER.glob("*.jsonl.xz"))
LARGEST_BYTES = 150_000
SECRETIVE = (r"Bearer \w", r"\bsk-\w{16}", r"/home/(?!agent|user)", r"/root/", r"/tmp/pytest", r"/s/[\w-]{8}")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[TemplateRenderer, Splitter]:
    folder = tmp_path_factory.mktemp("open") / "model"
    return open_renderer(folder), Splitter(folder / "tokenizer.json", seed=2)


@pytest.fixture(params=FILES, ids=lambda path: path.name.split(".")[0])
def path(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="session")
def played() -> dict[Path, Replay]:
    return {}


@pytest.fixture
async def replayed(
    path: Path, model: tuple[TemplateRenderer, Splitter], played: dict[Path, Replay]
) -> Replay:
    if path not in played:
        played[path] = await replay(read(path), *model)
    return played[path]


def test_there_is_one_of_every_agent_in_its_pinned_version() -> None:
    versions = {name: shipped_recipes()[name].version for name in AGENT_TOOLS}
    assert {read(path).agent: read(path).version for path in FILES} == versions
    assert len(versions) == 7


@pytest.mark.case(18, 33)
async def test_a_replay_gives_the_same_forest_to_the_token(path: Path, replayed: Replay) -> None:
    recording, books = read(path), read(path).books
    trajectory = replayed.trajectory
    assert list(replayed.statuses) == [exchange.status for exchange in recording.exchanges]
    assert [turn.parent for turn in trajectory.turns] == books["parents"]
    assert [segment.label for segment in trajectory.segments] == books["labels"]
    drifts = [[note.kind, note.cause, note.request, note.turn] for note in trajectory.drifts]
    assert drifts == books["drifts"]
    excluded = [[turn.index, turn.excluded] for turn in trajectory.turns if turn.excluded]
    assert excluded == books["excluded"]


async def test_the_engine_got_what_the_forest_holds_and_the_books_balance(replayed: Replay) -> None:
    trajectory, sent = replayed.trajectory, replayed.engine.sent
    found = paths(trajectory)
    assert len(found) == len(sent)
    assert all(np.array_equal(found[request.key.turn][0], request.ids) for request in sent)
    ledger = trajectory.ledger
    sampled = sum(len(turn.ids) for turn in trajectory.turns)
    masked = sum(int(segment.mask.sum()) for segment in trajectory.segments)
    assert ledger.balanced
    assert (ledger.captured, ledger.trained) == (sampled, masked)
    auxiliary = ledger.excluded.get("auxiliary", 0)
    assert ledger.trained >= 0.99 * (sampled - auxiliary)
    assert not replayed.session.stats.infra_error
    assert replayed.session.stats.malformed == 0


async def test_the_agent_would_be_told_the_same_again(path: Path, replayed: Replay) -> None:
    """Text, reasoning, calls and their ids: so what the agent echoed then fits what was said now."""
    assert list(replayed.replies) == [said(call) for call in read(path).calls]


def test_recordings_are_small_and_tell_nothing_of_where_they_were_made(path: Path) -> None:
    assert path.stat().st_size <= LARGEST_BYTES
    text = "\n".join(f"{each.headers} {each.body} {each.reply}" for each in read(path).exchanges)
    found = [pattern for pattern in SECRETIVE if re.search(pattern, text)]
    assert found == []
