"""Ranks of two hosts train as one process: learner and agents are processes, the hosts are this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts_lab import KEY, agent, free_port
from test_distributed import CONFIG, made_plan
from test_hf_policy import LORA, a_plan
from train_lab import small_model

from insitu_train.channel.host_link import SECRET
from insitu_train.embedded.model import save_model
from insitu_train.embedded.model_files import read_tensors
from insitu_train.learner.client import Learner
from insitu_train.learner.process import LearnerSpec
from insitu_train.options import Lora, OptimConfig, PolicyConfig, TrainConfig
from insitu_train.plan.step import StepPlan
from insitu_train.scores import score_file

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(small_model(0), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


async def two_steps(
    model: Path, train: TrainConfig, plan: StepPlan, folder: Path, resume: Path | None = None
) -> dict[str, object]:
    """Train the plan, save, train it again; or only that, from a checkpoint."""
    spec = LearnerSpec(
        model=model, train=train, samples=False, log=folder / "learner.log", start_deadline_s=120
    )
    async with Learner.start(spec) as learner:
        if resume:
            await learner.load(resume)
        else:
            await learner.step(plan, score_file(folder / "scores", 1))
            await learner.save(folder / "first")
            assert not await learner.written()
        result = await learner.step(plan)
        await learner.save(folder / "second")
        assert not await learner.written()
        assert result.version == 2
        return {"loss": result.loss, "tokens": result.tokens, "hosts": learner.hosts}


def weights_gap(one: Path, other: Path) -> float:
    a, b = read_tensors(one), read_tensors(other)
    assert a.keys() == b.keys()
    return max(float((a[n].float() - b[n].float()).abs().max()) for n in a)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["builtin", "hf", "lora", "sharded hf", "sharded lora"])
async def test_two_hosts_of_two_ranks_train_as_one_process_and_resume_on_one_and_three(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv(SECRET, KEY)
    port = free_port()
    lora: Lora | None = LORA if "lora" in kind else None
    policy = PolicyConfig() if kind == "builtin" else PolicyConfig(kind="hf", device="cpu", lora=lora)
    alone = CONFIG.changed(
        policy=policy, max_logprob_gap=100.0, max_staleness=9, optim=OptimConfig(lr=1e-3), threads=1,
        step_timeout_s=120.0,
    )  # fmt: skip
    plan = made_plan(4) if kind == "builtin" else a_plan()
    for name in ("alone", "hosts", "resumed-1", "resumed-3"):
        (tmp_path / name).mkdir()
    one = await two_steps(model, alone, plan, tmp_path / "alone")
    log = tmp_path / "agent.log"
    with agent(port, "--ranks", "2", log=log) as host:
        shared = alone.changed(ranks=f"2+2@127.0.0.1:{port}", shard="sharded" in kind)
        both = await two_steps(model, shared, plan, tmp_path / "hosts")
        assert host.wait(20) == 0, log.read_text()
    assert "train.ranks: 4 ranks, 2 here, 2 of " in str(both["hosts"])
    assert both["tokens"] == one["tokens"]
    assert both["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert weights_gap(tmp_path / "alone" / "second", tmp_path / "hosts" / "second") < 2e-4
    # every rank's scores came to the learner's machine
    assert len(list((tmp_path / "hosts" / "scores").iterdir())) == 4

    first = tmp_path / "hosts" / "first"
    await two_steps(model, alone, plan, tmp_path / "resumed-1", first)
    # three hosts of one rank: sharded, they hold one copy together
    spread = alone.changed(ranks=f"1+2@127.0.0.1:{port}", shard="sharded" in kind)
    with agent(port, log=log), agent(port, log=log):
        three = await two_steps(model, spread, plan, tmp_path / "resumed-3", first)
    assert str(three["hosts"]).count("1 of ") == 2
    for name in ("resumed-1", "resumed-3"):
        assert weights_gap(tmp_path / "hosts" / "second", tmp_path / name / "second") < 2e-4
