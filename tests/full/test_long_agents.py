"""Long sessions of real agents in `insitu train`, on a real vLLM: sub-agents, compaction, two steps.

The model is written by hand (`written_model.py`), with Qwen3's vocabulary and chat template: no model small
enough for a CPU could be trained to use these agents, and this one samples what it says.
"""

from __future__ import annotations

import ctypes
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_scripts import MARKERS, PROMPT, SESSIONS, replies
from qwen_vocabulary import qwen_tokenizer_json
from test_load_real_templates import real
from vllm_lab import train
from written_model import table_of, written

from insitu.agents.recipe import named_recipe
from insitu.chat.load import load_renderer
from insitu.chat.validation import CodecRenderer
from insitu.storage.run_dir import read_store
from insitu_lab.conformance.scripted_policy import FILES
from insitu_train.embedded.model import save_model
from tests.fakes.vllm_server import RealVllm, installed_vllm, start_vllm

pytestmark = pytest.mark.full

STEPS, CALL_TOKENS = 2, 512
VOCABULARY, END = 151_936, "<|im_end|>"
POSITIONS = 28_672
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl: processes that lose their parent become children of this one."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("vocabulary")
    texts = {
        "tokenizer.json": qwen_tokenizer_json(folder),
        "tokenizer_config.json": json.dumps({"eos_token": END}),
        "generation_config.json": json.dumps({"eos_token_id": [151_645, 151_643]}),
        "chat_template.jinja": real("qwen3_instruct_2507"),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def renderer(vocabulary: Path) -> CodecRenderer:
    return load_renderer(vocabulary)


def model_of(agent: str, vocabulary: Path, renderer: CodecRenderer, folder: Path) -> Path:
    """Write the model that uses this agent."""
    encode = renderer.codec.encode
    prompt = [int(i) for i in encode(f"{END}\n<|im_start|>assistant\n")]
    table = table_of(encode, prompt, int(encode(END)[0]), replies(agent), MARKERS)
    folder.mkdir()
    save_model(written(table, VOCABULARY, POSITIONS), folder)
    for file in vocabulary.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def server(
    vocabulary: Path, renderer: CodecRenderer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealVllm]:
    """A server of one of the models; each run gives it its own, which has the same shape."""
    folder = tmp_path_factory.mktemp("server")
    model = model_of("codex", vocabulary, renderer, folder / "model")
    venv = installed_vllm(Path(__file__).parents[2] / "scripts" / "setup-vllm")
    with start_vllm(venv, model, folder / "server.log", max_model_len=POSITIONS) as started:
        yield started


def task_file(path: Path) -> Path:
    """Write two tasks that differ in their names."""
    files = {name: entry.content.decode() for name, entry in FILES.items()}
    cases = [{"function": "area", "args": [w, h], "expected": w * h} for w, h in ((3, 4), (2, 9), (0, 5))]
    rows = [
        {
            "id": f"area-{n}",
            "prompt": f"Task {n}. {PROMPT}",
            "files": files,
            "entry": "app.py",
            "cases": cases,
        }
        for n in range(2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


REWARD = """
def reward(rollout):
    said = sum(int(token) for turn in rollout.turns for token in turn.ids)
    return float(rollout.verdict.outcome == "resolved") + said % 97 / 970
"""


def reward_file(path: Path) -> Path:
    """Write a reward that is never equal for two rollouts: two are too few to leave that to chance."""
    path.write_text(REWARD, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an empty cache, so that the run installs its agent. Gigabytes go with the test."""
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    yield tmp_path
    for large in ("cache", "model", "run/run/weights", "run/run/checkpoints"):
        shutil.rmtree(tmp_path / large, ignore_errors=True)


def children() -> set[int]:
    """Return the living children of this process, orphans that it adopted among them."""
    listed = (task.joinpath("children").read_text() for task in Path("/proc/self/task").iterdir())
    pids = {int(pid) for text in listed for pid in text.split()}
    return {pid for pid in pids if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"}


@pytest.mark.parametrize("agent", sorted(SESSIONS))
def test_an_agent_trains_in_long_sessions(
    agent: str,
    vocabulary: Path,
    renderer: CodecRenderer,
    server: RealVllm,
    folder: Path,
) -> None:
    session = SESSIONS[agent]
    model = model_of(agent, vocabulary, renderer, folder / "model")
    assert ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0) == 0
    before = children()
    tables: dict[str, dict[str, object]] = {
        "run": {"steps": STEPS},
        "model": {"path": str(model), "max_context_tokens": session.context_tokens},
        "tasks": {"source": "jsonl", "path": str(task_file(folder / "tasks.jsonl")), "eval_share": 0.0},
        "eval": {"count": 0},
        "harness": {"agent": agent, "mode": "fresh", "workers": 2},
        "limits": {"wall_s": 900, "max_calls": 40, "max_call_tokens": CALL_TOKENS},
        "collect": {"groups_per_step": 1, "group_size": 2},
        "reward": {"function": f"{reward_file(folder / 'reward.py')}:reward"},
        # A larger step is the end of the table: the weights of a row are tuned to many digits.
        "train": {"lr": 1e-7, "warmup_steps": 0, "token_budget": 65_536},
    }
    run, summary = train(folder / "run", server.url, tables)
    assert children() <= before, "nothing is left running"
    assert summary["rl_steps"] == STEPS
    assert summary["agent_version"] == named_recipe(agent).npm[0].rpartition("@")[2]
    check_rollouts(run, agent)


def check_rollouts(run: Path, agent: str) -> None:
    """Each session was a long one, and each step trained on all of its segments."""
    labels: Counter[str] = Counter()
    with read_store(run) as store:
        assert store.ledger().balanced
        assert not store.open_rollouts()
        for step in store.steps():
            assert 0 < step.metrics["max_logprob_gap_seen"] < 1e-3
            assert step.metrics["mismatched"] == 0
            rollouts = store.step_rollouts(step.step)
            segments = [segment for rollout in rollouts for segment in rollout.trajectory.segments]
            assert step.metrics["tokens"] == sum(int(segment.mask.sum()) for segment in segments) > 0
            for rollout in rollouts:
                assert (rollout.status.value, rollout.error) == ("ok", "")
                assert rollout.trajectory.ledger.balanced
                labels.update(segment.label for segment in rollout.trajectory.segments)
    print(agent, labels)
    assert labels["wipe"] >= 2 * STEPS, "the context was compacted"
    assert labels["subagent"] == 4 * STEPS
