"""A training run with an engine that cannot serve one is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.config import load_config
from whet.errors import ConfigError
from whet.record.run import RunDir
from whet.train.assembly import assemble


@pytest.mark.parametrize(
    "engine", [{"kind": "upstream", "url": "http://127.0.0.1:9", "model": "m"}, {"kind": "external"}]
)
async def test_an_engine_without_log_probabilities_is_refused(tmp_path: Path, engine: dict[str, str]) -> None:
    config = load_config(base={"run": {"dir": str(tmp_path / "run")}, "engine": engine})
    with RunDir.create(config) as run, run.store() as store:
        line = (
            rf"^engine.kind {engine['kind']}: a training run samples with embedded, .* a log-probability for"
        )
        with pytest.raises(ConfigError, match=line):
            async with assemble(run, store):
                pytest.fail("it started")
