"""A real Codex that takes its provider for the built-in one leaves compaction to it."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.agents.codex import RECIPE
from insitu.gateway.dialects.compaction import REQUEST
from insitu.sandbox.local import LocalBackend
from insitu_lab.conformance import run
from insitu_lab.conformance.agent_tools import AGENT_TOOLS

pytestmark = pytest.mark.full


((CONFIG, TEXT),) = RECIPE.config_files.items()


async def test_codex_goes_on_from_a_compaction_by_its_provider(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play = replace(AGENT_TOOLS["codex"], summarise=REQUEST[:40])
    monkeypatch.setattr(run, "AGENT_TOOLS", {"codex": play})
    named_openai = str(TEXT).replace('name = "insitu"', 'name = "OpenAI"')
    recipe = replace(RECIPE, config_files={CONFIG: named_openai})
    finding = await run.conform(recipe, LocalBackend("auto"), tmp_path)
    assert finding.failures == ()
    assert finding.compactions == 1
    assert (finding.unexplained, finding.trained) == (0, finding.sampled)
    lines = lzma.decompress((tmp_path / "codex.jsonl.xz").read_bytes()).splitlines()[1:]
    last = [json.loads(line)["body"]["input"][-1]["type"] for line in lines]
    assert last.count("compaction_trigger") == 1
    assert last[-1] == "compaction"
