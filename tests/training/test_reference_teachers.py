"""Teachers: reference policies by task set or behind a server, and groups that only they train."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from train_lab import CONFIG, VOCAB, group, rollout, sampled_groups, segment, slow_logprobs, small_model

from insitu.config import load_config
from insitu.errors import ConfigError, TrainError
from insitu.storage.run_dir import name_run
from insitu.types import Group
from insitu_train.checks import check_reference
from insitu_train.embedded.model import Qwen3, initialise, save_model
from insitu_train.learner.serialization import decode_plan, encode_plan
from insitu_train.loss.losses import LossConfig
from insitu_train.options import TrainConfig
from insitu_train.plan.step import PlanConfig, plan_digest, plan_step, use_of
from insitu_train.redaction import Redaction
from insitu_train.step_metrics import step_metrics
from insitu_train.trainer import scoring_server
from insitu_train.trainer.batch import make_batch
from insitu_train.trainer.reference import Reference, References, read_reference
from insitu_train.trainer.scoring_server import ScoringServer
from insitu_train.trainer.served_reference import ServedReference
from insitu_train.trainer.trainer import Trainer

DISTILLED = LossConfig(kl="k3", kl_weight=1.0, dppo_tau=0.0)


def of_set(one: Group, part: str) -> Group:
    return replace(one, rollouts=tuple(replace(r, part=part) for r in one.rollouts))


def with_equal_rewards(groups: list[Group]) -> list[Group]:
    return [group(g.id, [replace(r, reward=1.0) for r in g.rollouts]) for g in groups]


def expected(model: Qwen3, plan: Any) -> torch.Tensor:
    """Log-probabilities of all trained tokens of the first micro-batch, row by row."""
    rows = [plan.rows[i] for i in plan.batches[0].rows]
    with torch.no_grad():
        return torch.cat([slow_logprobs(model, row.ids)[torch.from_numpy(row.mask)] for row in rows])


# --------------------------------------------------------------------------- by task set


def test_each_row_is_scored_by_the_teacher_of_its_set() -> None:
    student, first, second = small_model(), small_model(1), small_model(2)
    groups = sampled_groups(student, groups=2)
    plan = plan_step([of_set(groups[0], "a"), of_set(groups[1], "b")], PlanConfig())
    batch = make_batch(plan, plan.batches[0])
    assert len(plan.batches) == 1
    found = References({"a": Reference(first), "b": Reference(second)}).logprobs(batch, 1.0)
    from_a = np.repeat([row.part == "a" for row in batch.rows], batch.counts)
    assert 0 < from_a.sum() < len(from_a)
    wanted = torch.where(torch.from_numpy(from_a), expected(first, plan), expected(second, plan))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_the_divergence_is_measured_of_each_set() -> None:
    student, first, second = small_model(), small_model(1), small_model()
    groups = sampled_groups(student, groups=2)
    plan = plan_step([of_set(groups[0], "a"), of_set(groups[1], "b")], PlanConfig())
    teachers = References({"a": Reference(first), "b": Reference(second)})
    result = Trainer(student, TrainConfig(loss=DISTILLED), reference=teachers).step(plan)
    found, tokens = result.ref_kl_of_sets, {"a": 0, "b": 0}
    for row in plan.rows:
        tokens[row.part] += int(row.mask.sum())
    assert found["b"] == pytest.approx(0.0, abs=1e-6)
    assert found["a"] > 1e-3
    whole = sum(found[name] * count for name, count in tokens.items()) / sum(tokens.values())
    assert result.ref_kl == pytest.approx(whole)
    metrics = step_metrics(groups, plan.ledger, result)
    assert metrics["a/ref_kl"] == found["a"]
    assert "ref_kl_of_sets" not in metrics


def test_a_set_without_a_teacher_is_an_error() -> None:
    plan = plan_step(sampled_groups(small_model(), groups=1), PlanConfig())
    references = References({"a": Reference(small_model(1)), "b": Reference(small_model(2))})
    with pytest.raises(TrainError, match="no reference policy for task set ''"):
        references.logprobs(make_batch(plan, plan.batches[0]), 1.0)


def test_the_set_of_a_row_reaches_the_learner_and_counts_in_the_digest() -> None:
    groups = sampled_groups(small_model(), groups=2)
    plan = plan_step([of_set(groups[0], "a"), of_set(groups[1], "b")], PlanConfig())
    arrived = decode_plan(encode_plan(plan))
    assert [row.part for row in arrived.rows] == [row.part for row in plan.rows]
    assert {row.part for row in arrived.rows} == {"a", "b"}
    moved = replace(plan, rows=tuple(replace(row, part="a") for row in plan.rows))
    assert plan_digest(moved) != plan.digest


def test_teachers_are_opened_once_each(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_model(small_model(seed), tmp_path / str(seed))
    tables = [
        {"name": "a", "reference": str(tmp_path / "1")},
        {"name": "b", "reference": str(tmp_path / "2")},
        {"name": "c"},
    ]
    base = {"tasks": tables, "train": {"kl": "k1", "kl_weight": 1.0}}
    config = TrainConfig.of(load_config(base=base))
    assert config.references == {"a": str(tmp_path / "1"), "b": str(tmp_path / "2"), "c": ""}
    found = read_reference(config, tmp_path / "1")
    assert found is not None
    assert len(found.policies) == 3  # a folder that is also the start is opened as what it is asked for
    alike = load_config(base=base | {"tasks": [tables[0], {**tables[1], "reference": str(tmp_path / "1")}]})
    one = read_reference(TrainConfig.of(alike), tmp_path / "2")
    assert isinstance(one, Reference)


def test_a_teacher_with_padded_embeddings_scores_by_all_its_rows() -> None:
    padded = initialise(replace(CONFIG, vocab_size=VOCAB + 10), 1)
    plan = plan_step(sampled_groups(small_model()), PlanConfig(pull=True))
    batch = make_batch(plan, plan.batches[0])
    torch.testing.assert_close(
        Reference(padded).logprobs(batch, 1.0), expected(padded, plan), atol=1e-5, rtol=0
    )
    config = TrainConfig(loss=DISTILLED)
    assert Trainer(small_model(), config, reference=Reference(padded)).step(plan).ref_kl > 0


# --------------------------------------------------------------------------- groups without a reward signal


def test_groups_with_equal_rewards_are_trained_where_they_are_kept() -> None:
    groups = with_equal_rewards(sampled_groups(small_model()))
    dropped = plan_step(groups, PlanConfig(pull=True))
    assert (dropped.rows, dropped.ledger.excluded) == ((), {"degenerate": dropped.ledger.captured})
    config = PlanConfig(pull=True, degenerate="keep")
    kept = plan_step(groups, config)
    assert kept.ledger.trained == kept.ledger.captured > 0
    assert {row.advantage for row in kept.rows} == {0.0}
    assert use_of(groups[0], config) == ""
    assert use_of(groups[0], PlanConfig(pull=True)) == "degenerate"


@pytest.mark.full
def test_a_student_approaches_its_teacher_without_rewards() -> None:
    torch.manual_seed(0)
    student, teacher = small_model(), small_model()
    with torch.no_grad():
        student.lm_head.weight.add_(0.5 * torch.randn_like(student.lm_head.weight))
    optim = TrainConfig().optim.changed(lr=3e-2, warmup_steps=0)
    trainer = Trainer(student, TrainConfig(loss=DISTILLED, optim=optim), reference=Reference(teacher))
    rules = PlanConfig(pull=True, degenerate="keep", advantage="zero")
    before = float(divergences(student, teacher).mean())
    for step in range(24):
        trainer.step(plan_step(one_token_groups(student, step), rules))
    # Of 12 seeds, 24 steps left 0.15 to 0.61 of it, and this seed 0.24.
    assert float(divergences(student, teacher).mean()) < 0.5 * before


CONTEXTS = np.random.default_rng(0).integers(0, VOCAB, (4, 10)).astype(np.int32)


def last_logprobs(model: Qwen3) -> torch.Tensor:
    """[4, vocab]: of the token after each context."""
    rows = torch.from_numpy(CONTEXTS.astype(np.int64))
    with torch.no_grad():
        return model.logits(model.hidden(rows[0, :0], rows))[:, -1].log_softmax(-1)


def divergences(student: Qwen3, teacher: Qwen3) -> torch.Tensor:
    """[4]: KL(student || teacher) after each context, over the whole vocabulary."""
    mine, theirs = last_logprobs(student), last_logprobs(teacher)
    return (mine.exp() * (mine - theirs)).sum(-1)


def one_token_groups(model: Qwen3, version: int) -> list[Group]:
    """A group of 64 rollouts with equal rewards for each context: one token that the model sampled."""
    logp = last_logprobs(model)
    drawn = torch.multinomial(logp.exp(), 64, replacement=True)
    made = []
    for at, context in enumerate(CONTEXTS):
        members = []
        for k, token in enumerate(drawn[at].tolist()):
            name = f"train/{version}/{at}/{k}"
            mask, mu = [False] * 10 + [True], [0.0] * 10 + [float(logp[at, token])]
            members.append(rollout(name, 1.0, [segment(name, 0, [*context, token], mask, mu, version)]))
        made.append(group(f"train/{version}/{at}", members))
    return made


# --------------------------------------------------------------------------- behind a server


def tokenizer(folder: Path, words: str = "w") -> Tokenizer:
    """A vocabulary of 50 words, written into the folder."""
    made = Tokenizer(WordLevel({f"{words}{i}": i for i in range(VOCAB)}, unk_token=f"{words}0"))
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return made


@contextmanager
def served(answers: Callable[[str, dict[str, Any]], Any]) -> Iterator[str]:
    """A server; an answer that is a number is a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            answer = answers(self.path, body)
            raw = json.dumps(answer).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Teacher:
    """Answers as vLLM does for a model and its tokenizer."""

    def __init__(self, model: Qwen3, words: Tokenizer) -> None:
        self.model, self.words, self.busy, self.spoil = model, words, 0, 0.0

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "teacher", "max_model_len": 64}]}
        if path == "/detokenize":
            return {"prompt": self.words.decode(body["tokens"], skip_special_tokens=False)}
        if self.busy:
            self.busy -= 1
            return 503
        ids = body["prompt"]
        with torch.no_grad():
            logp = slow_logprobs(self.model, np.array(ids, np.int32)).tolist()
        scores = [{str(i): {"logprob": value + self.spoil}} for i, value in zip(ids, logp, strict=True)]
        return {"choices": [{"prompt_logprobs": [None, *scores[1:]]}]}


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_server, "backoff_s", lambda failures, first_s: 0.01)


def served_reference(url: str, model: Path, timeout_s: float) -> ServedReference:
    return ServedReference(ScoringServer(url, "train.reference", model, timeout_s))


def test_a_server_scores_what_a_folder_scores(tmp_path: Path) -> None:
    teacher = Teacher(small_model(1), tokenizer(tmp_path / "m"))
    plan = plan_step(sampled_groups(small_model()), PlanConfig())
    batch = make_batch(plan, plan.batches[0])
    with served(teacher) as url:
        scorer = served_reference(url, tmp_path / "m", 10.0)
        teacher.busy = 2
        found = scorer.logprobs(batch, 1.0)
    assert scorer.max_positions == 63
    torch.testing.assert_close(found, Reference(small_model(1)).logprobs(batch, 1.0), atol=1e-5, rtol=0)


def test_a_step_with_a_served_teacher_is_that_with_its_folder(tmp_path: Path) -> None:
    config, plan = (
        TrainConfig(loss=DISTILLED),
        plan_step(sampled_groups(small_model()), PlanConfig(pull=True)),
    )
    with served(Teacher(small_model(1), tokenizer(tmp_path / "m"))) as url:
        far = Trainer(small_model(), config, reference=served_reference(url, tmp_path / "m", 10.0)).step(plan)
    near = Trainer(small_model(), config, reference=Reference(small_model(1))).step(plan)
    assert (far.ref_kl, far.grad_norm) == pytest.approx((near.ref_kl, near.grad_norm), rel=1e-4)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (lambda path, body: 404, "is not a vLLM server that scores: .* answered 404"),
        (lambda path, body: {"data": []}, "is not a vLLM server that scores"),
    ],
)
def test_a_server_of_another_kind_is_one_line(tmp_path: Path, fault: Any, line: str) -> None:
    tokenizer(tmp_path / "m")
    with served(fault) as url, pytest.raises(ConfigError, match=line):
        served_reference(url, tmp_path / "m", 5.0)


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.reference: http://127.0.0.1:1 is not a vLLM server"):
        served_reference("http://127.0.0.1:1", tokenizer(tmp_path / "m") and tmp_path / "m", 5.0)


def test_a_server_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    teacher = Teacher(small_model(1), tokenizer(tmp_path / "other", "v"))
    tokenizer(tmp_path / "m")
    with served(teacher) as url, pytest.raises(ConfigError, match="has another vocabulary than model.path"):
        served_reference(url, tmp_path / "m", 5.0)


def test_what_is_no_log_probability_stops_the_step(tmp_path: Path) -> None:
    teacher = Teacher(small_model(1), tokenizer(tmp_path / "m"))
    plan = plan_step(sampled_groups(small_model()), PlanConfig())
    with served(teacher) as url:
        scorer = served_reference(url, tmp_path / "m", 5.0)
        teacher.spoil = float("nan")
        with pytest.raises(TrainError, match="log-probabilities of rollout .* are not usable"):
            scorer.logprobs(make_batch(plan, plan.batches[0]), 1.0)
        named = re.escape(f"the teacher {url} (train.reference)")
        with pytest.raises(TrainError, match="temperature = 1 only"):
            scorer.logprobs(make_batch(plan, plan.batches[0]), 0.7)
    with pytest.raises(TrainError, match=f"{named}: /v1/completions: .*refused"):
        scorer.logprobs(make_batch(plan, plan.batches[0]), 1.0)


# --------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("base", "line"),
    [
        ({"train": {"degenerate": "keep"}}, "degenerate = 'keep' needs kl with kl_weight above 0"),
        ({"train": {"advantage": "zero", "kl": "k1"}}, "advantage = 'zero' needs kl with kl_weight above 0"),
        (
            {"train": {"advantage": "zero", "kl": "k1", "kl_weight": 1.0}},
            "train.advantage = 'zero' needs train.reference: a model teaches itself nothing",
        ),
        (
            {
                "tasks": [{"name": "a"}, {"name": "b", "reference": "/m", "weight": 0}],
                "train": {"kl": "k1", "kl_weight": 1.0},
            },
            "tasks.b.reference has no effect with weight = 0",
        ),
        ({"tasks": {"reference": "/m"}}, "tasks.reference has no effect with train.kl = 'none'"),
    ],
)
def test_keys_without_a_teacher_are_refused(base: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load_config(base=base)


def test_a_teacher_is_checked_before_anything_starts(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, words in ((ours, "w"), (theirs, "v")):
        save_model(small_model(), folder)
        tokenizer(folder, words)
    train = {"kl": "k1", "kl_weight": 1.0}
    base: dict[str, Any] = {"model": {"path": str(ours)}, "train": train, "tasks": {"reference": str(theirs)}}

    def refused(line: str) -> None:
        with pytest.raises(ConfigError, match=line):
            check_reference(load_config(base=base))

    refused("^tasks.reference: .*theirs has another vocabulary than model.path")
    tokenizer(theirs)
    check_reference(load_config(base=base))
    described = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(described | {"vocab_size": VOCAB + 10}))
    check_reference(load_config(base=base))
    (theirs / "config.json").write_text(json.dumps(described | {"vocab_size": VOCAB - 1}))
    refused("^tasks.reference: .*theirs has 49 rows for 50 tokens")
    own = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(own | {"vocab_size": VOCAB - 1}))
    check_reference(load_config(base=base))  # what the student cannot sample, no teacher needs to score
    (theirs / "tokenizer.json").unlink()
    refused("^tasks.reference: .*theirs has no tokenizer.json to compare")
    base["tasks"] = {"reference": str(tmp_path / "none")}
    refused("^tasks.reference: .*none is not a model folder")
    base["tasks"] = [{"name": "a", "reference": "http://127.0.0.1:1"}, {"name": "b"}]
    refused("^tasks.a.reference: http://127.0.0.1:1 is not a vLLM server that scores: .* refused")
    base |= {"tasks": {}, "train": train | {"reference": "http://host:8000"}, "engine": {"temperature": 0.7}}
    refused("train.reference: a server scores at engine.temperature = 1 only")


def test_a_run_keeps_the_address_of_a_teacher(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8000"
    base = {"train": {"kl": "k1", "kl_weight": 1.0, "reference": url}, "tasks": {"reference": url}}
    named = name_run(load_config(base=base | {"run": {"dir": str(tmp_path)}}))
    assert (named.train.reference, named.tasks[0].reference) == (url, url)
    shared = Redaction().config(named)
    assert shared.train.reference == url
