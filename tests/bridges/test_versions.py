"""Other versions of TRL, verl, OpenEnv and renderers: made distributions whose modules have other layouts."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trl_cpu import arguments

from insitu.chat.codec import Codec
from insitu.config import load_config
from insitu.errors import ConfigError, RenderError
from insitu_bridges import renderers_adapter, trl, verl
from insitu_bridges.trl import asynchronous
from insitu_bridges.versions import Need, check

CONFIG = load_config(None, ("collect.groups_per_step=4", "collect.group_size=8", "collect.max_staleness=1"))
Install = Callable[[str, str, dict[str, str]], None]

GRPO = "class GRPOTrainer:\n    def __init__(self, model, reward_funcs, rollout_func=None): ...\n"
TRAINER = """
    class AsyncGRPOTrainer:
        def __init__(self, model, reward_funcs, args=None, rollout_worker=None, weight_transfer=None): ...
"""
SAMPLE = """
    from dataclasses import dataclass
    from typing import Any

    @dataclass(slots=True)
    class RolloutSample:
        prompt: Any
        completion: Any
        input_ids: Any
        completion_mask: Any
        old_log_probs: Any
        advantage: float
        model_version: int
        group_id: int
        metrics: dict[str, float]
        enqueued_at: float | None = None
"""
OLD = {
    "trl/__init__.py": GRPO,
    "trl/experimental/__init__.py": "",
    "trl/experimental/async_grpo/__init__.py": TRAINER,
    "trl/experimental/async_grpo/async_rollout_worker.py": SAMPLE,
}
"""TRL 1.16 and 1.17: the async trainer is experimental."""
STABLE = "trl/trainer/async_grpo_trainer.py"
NEW = {"trl/__init__.py": GRPO, "trl/trainer/__init__.py": "", STABLE: SAMPLE + TRAINER}
"""TRL 1.18 and later: one stable module."""
HARNESS = """
    class TrainingTrace:
        def __init__(self, *, schema_version=1, turns): ...

    class VerifyResult:
        def __init__(self, env_reward=None, done=False, metrics=None): ...
"""
SESSIONS = "openenv/core/harness/__init__.py"
OPENENV = {"openenv/__init__.py": "", "openenv/core/__init__.py": "", SESSIONS: HARNESS}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a made package in front of real ones; its modules are forgotten afterwards."""
    before = dict(sys.modules)
    names: list[str] = []

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]

    def make(package: str, version: str, files: dict[str, str]) -> None:
        root = tmp_path / f"{package}-{version}"
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(textwrap.dedent(text))
        info = root / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(root)
        names.append(package)
        forget()

    yield make
    forget()
    sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in names})


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("version", "layout"), [("1.17.0", OLD), ("1.19.0", NEW), ("1.160.0", OLD)], ids=["1.17", "1.19", "1.160"]
)
def test_another_trl_is_taken_when_all_that_is_used_is_there(
    version: str, layout: dict[str, str], install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("trl", version, layout)
    install("openenv", "0.10.0", OPENENV)
    trl.rollout_func(CONFIG)
    trl.SessionFactory(CONFIG)
    trl.RolloutWorker(CONFIG, arguments())
    assert asynchronous.SAMPLE.get().__module__.startswith("trl.")
    lines = said(caplog)
    assert len(lines) == 3
    assert all(f"trl {version} is not 1.16, with which tests ran" in line for line in lines)


def test_the_proven_trl_is_taken_in_silence_and_not_even_imported(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("trl", "1.16.2", {"trl/__init__.py": "raise SystemExit('imported')"})
    trl.rollout_func(CONFIG)
    assert not said(caplog)


def test_rollout_func_stays_where_the_async_trainer_takes_no_worker(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    bare = "class AsyncGRPOTrainer:\n    def __init__(self, model): ..."
    install("trl", "1.18.2", {**NEW, STABLE: bare})
    trl.rollout_func(CONFIG)
    with pytest.raises(ConfigError) as refused:
        trl.RolloutWorker(CONFIG, arguments())
    text = str(refused.value)
    assert text.startswith("trl 1.18.2: AsyncGRPOTrainer takes no rollout_worker, weight_transfer; there")
    assert "no RolloutSample in trl.trainer.async_grpo_trainer or trl.experimental" in text
    assert text.endswith("trl 1.16 has all of it: pip install 'trl==1.16.*'")
    assert "\n" not in text


def test_a_row_with_a_field_that_the_bridge_does_not_know_is_refused(install: Install) -> None:
    more = SAMPLE.replace("enqueued_at: float | None = None", "entropy: float")
    install("trl", "1.20.0", {**NEW, STABLE: more + TRAINER})
    with pytest.raises(ConfigError, match="takes no enqueued_at; RolloutSample wants entropy too"):
        trl.RolloutWorker(CONFIG, arguments())


def test_a_trl_without_rollout_func_is_refused(install: Install) -> None:
    install("trl", "0.20.0", {"trl/__init__.py": "class GRPOTrainer:\n    def __init__(self, model): ..."})
    with pytest.raises(ConfigError, match=r"^trl 0\.20\.0: GRPOTrainer takes no rollout_func; trl 1\.16 has"):
        trl.rollout_func(CONFIG)


def test_a_session_needs_the_classes_of_openenv_only(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("trl", "1.19.0", {"trl/__init__.py": ""})
    install("openenv", "0.14.0", OPENENV)
    trl.SessionFactory(CONFIG)
    assert len(said(caplog)) == 2
    install("openenv", "0.15.0", {**OPENENV, SESSIONS: ""})
    with pytest.raises(ConfigError, match=r"^openenv 0\.15\.0: there is no TrainingTrace in"):
        trl.SessionFactory(CONFIG)


def test_arguments_of_the_stable_async_trainer_have_one_batching_mode() -> None:
    stable = arguments()
    del stable.token_budget
    trl.check_async(CONFIG, stable)
    del stable.weight_sync_steps
    with pytest.raises(ConfigError, match="AsyncGRPOConfig has no weight_sync_steps"):
        trl.check_async(CONFIG, stable)


OTHER = "{} is not {}, with which tests ran; what insitu uses of it is there"


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (verl.OUTPUT.arguments, ""),
        (
            verl.OUTPUT.arguments[:3],
            "AgentLoopOutput takes no response_logprobs, routed_experts, reward_score",
        ),
    ],
    ids=["all", "fields-gone"],
)
def test_another_verl_is_taken_when_its_output_has_the_fields(
    fields: tuple[str, ...], wrong: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    files = {f"verl/{folder}__init__.py": "" for folder in ("", "experimental/", "experimental/agent_loop/")}
    text = f"class AgentLoopOutput:\n    def __init__(self, *, {', '.join(fields)}): ..."
    install("verl", "0.10.0", {**files, "verl/experimental/agent_loop/agent_loop.py": text})
    if wrong:
        with pytest.raises(ConfigError, match=rf"^verl 0\.10\.0: {wrong}"):
            verl.check_output()
    else:
        verl.check_output()
        assert said(caplog) == [OTHER.format("verl 0.10.0", "0.9")]


def test_what_is_not_installed_is_not_looked_for() -> None:
    check("no_such_package_of_a_trainer", Need(("no_such_package_of_a_trainer:Name",)))


def test_another_renderers_package_is_taken_and_names_its_rules(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = "def create_renderer(tokenizer, config): ..."
    configs = {"renderers/configs.py": "class BaseRendererConfig: ..."}
    found = renderers_adapter._found.__wrapped__
    install("renderers", "0.2.0", {**configs, "renderers/__init__.py": create})
    assert found() == "0.2.0"
    assert said(caplog) == [OTHER.format("renderers 0.2.0", "0.1.12")]
    monkeypatch.setattr(renderers_adapter, "_found", lambda: "0.2.0")
    with pytest.raises(RenderError, match="the qwen3 rules do not fit"):
        renderers_adapter._renderer("qwen3", {}, Codec.__new__(Codec))
    install("renderers", "0.3.0", {**configs, "renderers/__init__.py": ""})
    with pytest.raises(RenderError, match=r"^renderers 0\.3\.0: there is no create_renderer"):
        found()
