"""The scripted teacher of the toy tasks is right in each family; `insitu sft` takes its rollouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from insitu import cli
from insitu.chat.load import load_renderer
from insitu.config import WARM_START
from insitu.storage.run_dir import read_store
from insitu.tasks.toy import FAMILIES, make_problem
from insitu.types import IntArray, Message, ToolCall
from insitu_train.demo.teacher import expression, next_turn

RENDERER = load_renderer(WARM_START)


def prompt(*messages: Message) -> IntArray:
    ids = [RENDERER.open([Message(role="system", text="Fix the code.")], [])]
    for message in messages:
        assistant = message.role == "assistant"
        ids.append(RENDERER.render_reply(message) if assistant else RENDERER.append([message]))
        if not assistant:
            ids.append(RENDERER.generation_prompt())
    return np.concatenate(ids)


def answer(text: str) -> Message:
    return Message(role="tool", text=text, tool_call_id="a")


def called(name: str) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="a", name=name, arguments="{}"),))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_reads_edits_and_ends_in_each_family(family: str) -> None:
    for seed in range(20):
        problem = make_problem(seed, [family])
        issue = Message(role="user", text=problem.prompt)
        (read,) = next_turn(RENDERER, prompt(issue)).tool_calls
        assert (read.name, json.loads(read.arguments)) == ("read", {"path": problem.path})
        seen = [issue, called("read"), answer(problem.text(solved=False))]
        (edit,) = next_turn(RENDERER, prompt(*seen)).tool_calls
        (change,) = json.loads(edit.arguments)["edits"]
        assert problem.text(solved=False).count(change["oldText"]) == 1
        assert problem.text(solved=False).replace(change["oldText"], change["newText"]) == problem.text(
            solved=True
        )
        seen += [called("edit"), answer(f"Successfully replaced 1 block(s) in {problem.path}.")]
        assert next_turn(RENDERER, prompt(*seen)).text == "done"


def test_a_prompt_that_it_does_not_know_ends_it() -> None:
    assert next_turn(RENDERER, prompt(Message(role="user", text="Hello."))).text == "done"
    failed = [Message(role="user", text=make_problem(1).prompt), called("read"), answer("No such file")]
    assert next_turn(RENDERER, prompt(*failed)).text == "done"


def test_what_a_comment_describes() -> None:
    assert expression("the smaller of a and b") == "min(a, b)"
    assert expression("whether a is at most b") == "a <= b"
    assert expression("a divided by 3") == "a // 3"


@pytest.mark.slow
def test_demonstrations_come_from_an_engine_without_logprobs(tmp_path: Path) -> None:
    run = tmp_path / "teacher"
    keys = ["model.path=", "model.renderer=auto", "rollout.count=3", "harness.workers=3", f"run.dir={run}"]
    assert cli.main(["rollout", "examples/small-agent-teacher.toml", "--plain", *keys]) == 0
    with read_store(run) as store:
        (phase,) = store.phases()
        rollouts = store.rollouts(*phase)
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0, 1.0]
    for rollout in rollouts:
        (segment,) = rollout.trajectory.segments
        assert segment.kind == "demonstrated"
        assert len(rollout.trajectory.turns) == 3
