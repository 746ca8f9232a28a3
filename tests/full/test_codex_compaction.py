"""A real Codex that takes its provider for the built-in one leaves compaction to it."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.agents.codex import CONFIG, RECIPE
from insitu.agents.recipe import Start
from insitu.gateway.dialects.compaction import REQUEST
from insitu.sandbox.local import LocalBackend
from insitu.suites.conformance import run
from insitu.suites.conformance.agent_tools import PLAYS

pytestmark = pytest.mark.full


def named_openai(start: Start) -> Mapping[str, bytes]:
    files = dict(RECIPE.files(start))
    files[CONFIG] = files[CONFIG].replace(b'name = "insitu"', b'name = "OpenAI"')
    return files


async def test_codex_goes_on_from_a_compaction_by_its_provider(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play = replace(PLAYS["codex"], summarise=REQUEST[:40])
    monkeypatch.setattr(run, "PLAYS", {"codex": play})
    monkeypatch.setattr(run, "find", lambda kind, name: replace(RECIPE, files=named_openai))
    finding = await run.conform("codex", LocalBackend("auto"), tmp_path)
    assert finding.failures == ()
    assert finding.compactions == 1
    assert (finding.unexplained, finding.trained) == (0, finding.sampled)
    lines = lzma.decompress((tmp_path / "codex.jsonl.xz").read_bytes()).splitlines()[1:]
    last = [json.loads(line)["body"]["input"][-1]["type"] for line in lines]
    assert last.count("compaction_trigger") == 1
    assert last[-1] == "compaction"
