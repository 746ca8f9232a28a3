"""Tasks that are graded in the agent's own sandbox, with what the agent left running."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.attempt import AttemptExecutor, AttemptSpec
from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.config import Config, load_config
from insitu.errors import ConfigError, TaskError
from insitu.gateway.token_backend import TokenBackend
from insitu.grading.grader import GradeConfig, Grader
from insitu.grading.runners.find import runner_for
from insitu.runtime.agents import limits_of
from insitu.runtime.preflight import open_mix
from insitu.runtime.run import open_runtime
from insitu.runtime.sandboxes import check_tasks
from insitu.sandbox.local import LocalBackend
from insitu.tasks.base import Item, TaskSource
from insitu.tasks.dataset import RowSource
from insitu.tasks.factory import format_of, open_source
from insitu.types import Message, Outcome, Rollout, Status, task_hash
from insitu_tasksets.live import everywhere
from insitu_tasksets.validate import check_item
from insitu_train.demo.demonstrator import call
from insitu_train.demo.make_warm_start import write_renderer
from insitu_train.demo.scripted import ScriptedEngine

SERVER = """\
import http.server, os
if os.fork():
    os._exit(0)
os.setsid()
http.server.HTTPServer(("127.0.0.1", 9000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
ASK = """python3 -c 'import urllib.request as u; print(u.urlopen("http://127.0.0.1:9000/page").read())'"""
ROW = {
    "id": "serve",
    "prompt": "Serve this folder at port 9000.",
    "files": {"page": "hello\n", "serve.py": SERVER},
    "checks": [{"command": ASK, "markers": ["hello"]}, {"command": "test -f hidden/proof && test ! -e junk"}],
    "tests": {"hidden/proof": "x"},
    "where": "live",
    "timeout_s": 20,
}
SERVE = "python3 serve.py >/dev/null 2>&1 </dev/null; echo page >> page; sleep 0.5"
DONE = Message(role="assistant", text="done")


def opened(folder: Path, **changes: object) -> tuple[Config, TaskSource]:
    (folder / "rows.jsonl").write_text(json.dumps(ROW | changes) + "\n")
    config = load_config(
        None,
        [
            "harness.agent=script", "harness.workers=1", "limits.wall_s=20", "limits.max_call_tokens=512",
            "model.max_context_tokens=16384", "tasks.source=jsonl", f"tasks.path={folder / 'rows.jsonl'}",
            "tasks.eval_share=0", f"sandbox.backend={'docker' if 'image' in changes else 'local'}",
        ],
    )  # fmt: skip
    return config, open_source(config, limits_of(config), runner_for)


async def attempt(folder: Path, command: str, **changes: object) -> Rollout:
    config, source = opened(folder, **changes)
    write_renderer(folder / "family", "")
    renderer = template_renderer(read_folder(folder / "family"))
    script = [call("bash", command=command), DONE]
    engine = ScriptedEngine(renderer, lambda ids, key: script[min(key.turn, 1)], sampled=True)
    spec = AttemptSpec(rollout_id="train/00001/000/00", task=source.tasks("train", 0, 1)[0], seed=1)
    async with open_runtime(config, TokenBackend(engine, renderer), source) as runtime:
        return await AttemptExecutor(runtime.gateway, runtime.workers, runtime.judge).run(spec)


@pytest.mark.slow
async def test_a_server_that_the_agent_left_running_is_asked(tmp_path: Path) -> None:
    rollout = await attempt(tmp_path, SERVE)
    verdict = rollout.verdict
    assert verdict is not None, rollout.error
    assert (rollout.status, rollout.reward, verdict.outcome) == (Status.OK, 1.0, Outcome.RESOLVED), verdict
    assert (verdict.trust, verdict.reason) == ("weak", "in the agent's own sandbox: 2 of 2 checks pass")
    assert {*rollout.changed} == {"page"}, "the hidden files came after the work folder was read"
    assert rollout.timings.grade_s > 0
    ledger = rollout.trajectory.ledger
    assert ledger.balanced
    assert ledger.trained == ledger.captured > 0


@pytest.mark.full
async def test_a_server_that_the_agent_left_running_in_an_image_is_asked(
    docker_image: str, tmp_path: Path
) -> None:
    rollout = await attempt(tmp_path, SERVE, image=docker_image, workdir="/app")
    verdict = rollout.verdict
    assert verdict is not None, rollout.error
    assert (rollout.status, rollout.reward, verdict.image) == (Status.OK, 1.0, docker_image), verdict
    assert (verdict.trust, verdict.reason) == ("weak", "in the agent's own sandbox: 2 of 2 checks pass")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "changes", "outcome"),
    [
        ("echo page >> page", {}, Outcome.UNRESOLVED),
        (SERVE, {"where": "clean"}, Outcome.UNRESOLVED),
        ("echo 'kill -9 -1' > ~/.profile; (sleep 1; kill -9 -1) & kill -9 -1", {}, Outcome.UNRESOLVED),
        ("cat /dev/zero > full; true", {}, Outcome.UNRESOLVED),
    ],
)
async def test_nothing_else_earns_it(
    tmp_path: Path, command: str, changes: dict[str, object], outcome: Outcome
) -> None:
    rollout = await attempt(tmp_path, command, **changes)
    assert rollout.verdict is not None, rollout.error
    assert (rollout.verdict.outcome, rollout.reward) == (outcome, 0.0)


async def test_only_checks_are_run_in_the_agents_sandbox(tmp_path: Path) -> None:
    case = {"function": "f", "args": [], "expected": 1}
    with pytest.raises(TaskError, match="where = live needs checks, not runner json_io"):
        opened(tmp_path, checks=[], tests={}, cases=[case], entry="serve.py")


async def test_where_nothing_is_left_of_it_such_a_task_is_refused(tmp_path: Path) -> None:
    config, source = opened(tmp_path)
    task = source.tasks("train", 0, 1)[0]
    said: list[str] = []
    open_mix(config, said.append)
    assert said == ["1 tasks of jsonl are graded in their agent's sandbox: weak"]
    with pytest.raises(TaskError, match="1 of 1 tasks are less trusted"):
        open_mix(load_config(None, {"grade.min_trust": "standard"}, config.model_dump(exclude_unset=True)))
    alone = config.model_copy(update={"harness": config.harness.model_copy(update={"agent": "single_turn"})})
    with pytest.raises(ConfigError, match="single_turn has none"):
        check_tasks(alone, [task])


RUN_TESTS = (
    """python3 -c 'import urllib.request as u; assert u.urlopen("http://127.0.0.1:9000/page").read()'\n"""
)


def terminal_bench(root: Path, solution: str) -> Item:
    """A task folder whose check asks a server; without its image, which local sandboxes cannot have."""
    files = {
        "task.yaml": "instruction: Serve /app at port 9000.\nmax_agent_timeout_sec: 20.0\n",
        "Dockerfile": "FROM debian\nWORKDIR /app\n",
        "run-tests.sh": RUN_TESTS,
        "solution.sh": f"cat > serve.py <<'END'\n{SERVER}END\necho hello > page\n{solution}\n",
    }
    for name, text in files.items():
        (root / "serve").mkdir(exist_ok=True)
        (root / "serve" / name).write_text(text)
    form = format_of("terminal_bench")
    (item,) = RowSource("terminal_bench", form, root, transform=everywhere).every()
    task = replace(item.task, setup=replace(item.task.setup, image=""))
    named = task_hash(task.prompt, task.files, task.grading, task.setup)
    return Item(task=replace(task, content_hash=named), oracle=item.oracle)


@pytest.mark.slow
async def test_a_task_of_terminal_bench_that_leaves_a_server_is_validated(tmp_path: Path) -> None:
    backend = LocalBackend()
    grader = Grader(backend, GradeConfig(timeout_s=20.0))
    item = terminal_bench(tmp_path, "python3 serve.py >/dev/null 2>&1 </dev/null; sleep 0.5")
    assert (item.task.grading.where, item.task.setup.roots) == ("live", ("/tests", "/logs"))
    found = await check_item(grader, backend, item, 1)
    assert (found.status, found.reason) == ("passed", "")
    broken = await check_item(grader, backend, terminal_bench(tmp_path, "true"), 1)
    assert broken.status == "failed"
    assert broken.reason.startswith(
        "the gold fails (unresolved): in the agent's own sandbox: the tests gave 0"
    )
    claimed = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json"
    forged = await check_item(grader, backend, terminal_bench(tmp_path, claimed), 1)
    assert (forged.status, forged.reason) == (broken.status, broken.reason)
    verdict = await grader.grade(item.task, item.oracle, {})
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None), (
        "a stored rollout cannot be graded again"
    )
