"""What the forest refuses, and how much it can hold."""

from __future__ import annotations

import numpy as np
import pytest
from capture_lab import (
    FINGERPRINT,
    START,
    Lab,
    answer,
    call,
    long_chain,
    row,
    says,
    user,
)

from insitu.capture.forest import Forest
from insitu.errors import CaptureError
from insitu.types import Generation, ModelRequest


def generation(**changes: object) -> Generation:
    values: dict[str, object] = {
        "ids": row([7, 8, 9]),
        "logprobs": np.array([-1, -2, -3], dtype=np.float32),
        "finish": "stop",
        "version_runs": ((0, 1),),
    }
    return Generation(**{**values, **changes})  # type: ignore[arg-type]


def logprobs(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": row([])}, "no id was sampled"),
        ({"ids": np.array([7, 8, 9])}, "int64"),
        ({"ids": row([7, -8, 9])}, "turn 5 token 1: a sampled id is negative"),
        ({"logprobs": logprobs(-1, -2)}, "turn 5 token 2: 2 logprobs for 3"),
        ({"logprobs": logprobs(-1, -2, -3, -4)}, "turn 5 token 3: 4 logprobs for 3"),
        ({"logprobs": logprobs(-1, float("nan"), -3)}, "turn 5 token 1: logprob nan"),
        ({"logprobs": logprobs(-1, -2, float("-inf"))}, "turn 5 token 2: logprob -inf"),
        ({"logprobs": logprobs(1e-6, -2, -3)}, "turn 5 token 0: logprob"),
        ({"logprobs": np.array([-1.0, -2.0, -3.0])}, "float64"),
        ({"version_runs": ()}, "turn 5 token 0: no policy version"),
        ({"version_runs": ((1, 1),)}, "turn 5 token 0: no policy version"),
        ({"version_runs": ((0, 1), (2, 2), (2, 3))}, "turn 5 token 2: version runs are not in order"),
        ({"version_runs": ((0, 1), (3, 2))}, "turn 5 token 3: a version run starts after"),
        ({"version_runs": ((0, -1),)}, "negative"),
    ],
)
def test_a_generation_that_cannot_be_trusted_is_refused(changes: dict[str, object], message: str) -> None:
    lab = Lab("run/3/1")
    made = lab.ask(START)
    with pytest.raises(CaptureError, match="run/3/1 turn 5") as raised:
        lab.forest.commit(made.context, generation(**changes), says("x"), turn=5)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(lab.forest) == 1


def test_zero_is_a_logprob() -> None:
    lab = Lab()
    lab.forest.commit(lab.ask(START).context, generation(logprobs=logprobs(0, -2, 0)), says("x"), turn=0)


def test_a_synthetic_reply_with_logprobs_is_refused() -> None:
    lab = Lab()
    with pytest.raises(CaptureError, match="synthetic"):
        lab.forest.commit(lab.ask(START).context, generation(), says("x"), turn=0, synthetic=True)


def test_turn_numbers_call_ids_and_roles_are_checked() -> None:
    lab = Lab()
    made = lab.turn(START, says("", call("c0")))
    with pytest.raises(CaptureError, match="used once"):
        lab.forest.commit(made.context, generation(), says("x"), turn=0)
    with pytest.raises(CaptureError, match="minted call id"):
        lab.forest.commit(made.context, generation(), says("", call("c0")), turn=1)
    with pytest.raises(CaptureError, match="minted call id"):
        lab.forest.commit(made.context, generation(), says("", call("n"), call("n")), turn=1)
    with pytest.raises(CaptureError, match="role assistant"):
        lab.forest.commit(made.context, generation(), user("x"), turn=1)
    with pytest.raises(CaptureError, match="not a context node"):
        lab.forest.commit(made.node, generation(), says("x"), turn=1)
    with pytest.raises(CaptureError, match="no such reason"):
        lab.forest.exclude(made.node, "boring")
    for missing in (-1, 99):
        with pytest.raises(CaptureError, match="no node"):
            lab.forest.mark_aborted(missing)
    with pytest.raises(CaptureError, match="not a sampled node"):
        lab.forest.mark_delivered(made.context)


def test_a_family_that_is_not_pure_is_found_out() -> None:
    forest = Forest("r")
    request = ModelRequest(messages=tuple(START))
    forest.extend(forest.plan(request, "f"), row([1, 2, 3]))
    with pytest.raises(CaptureError, match="token 2: the same messages"):
        forest.extend(forest.plan(request, "f"), row([1, 2, 4]))


def test_a_foreign_message_spelled_anew_keeps_the_held_ids() -> None:
    forest = Forest("r")
    sent = [user("u"), says("", call("x", '{"a":1,"b":2}')), user("v")]
    held = forest.extend(forest.plan(ModelRequest(messages=tuple(sent)), "f"), row([1, 2, 3]))
    sent[1] = says("", call("x", '{"b":2,"a":1}'))
    again = forest.extend(forest.plan(ModelRequest(messages=tuple(sent)), "f"), row([1, 3, 2]))
    assert again == held
    assert forest.path_ids(again).tolist() == [1, 2, 3]


@pytest.mark.parametrize("delta", [row([]), np.array([1, 2]), row([1, -1]), row([[1, 2]])])  # type: ignore[list-item]
def test_a_root_prompt_must_be_a_row_of_ids(delta: np.ndarray) -> None:
    forest = Forest("r")
    with pytest.raises(CaptureError):
        forest.extend(forest.plan(ModelRequest(messages=tuple(START)), "f"), delta)


def test_a_sealed_session_refuses_everything_and_repeats_its_answer() -> None:
    lab = Lab()
    made = lab.turn(START, says("a"))
    late = lab.ask([*START, says("a"), user("go")])
    sealed = lab.forest.trajectory()
    assert lab.forest.trajectory() is sealed
    with pytest.raises(CaptureError, match="turn 1 came after the session was sealed"):
        lab.forest.commit(late.context, generation(), says("x"), turn=1)
    refused = (
        lambda: lab.forest.plan(ModelRequest(messages=tuple(START)), FINGERPRINT),
        lambda: lab.forest.extend(late.plan, row([1])),
        lambda: lab.forest.mark_delivered(made.node),
        lambda: lab.forest.mark_aborted(late.context),
        lambda: lab.forest.exclude(made.node, "stale"),
    )
    for act in refused:
        with pytest.raises(CaptureError, match="sealed"):
            act()


def test_tokens_changed_after_commit_are_found_at_export() -> None:
    lab = Lab("r7")
    made = lab.turn(START, says("a"))
    held = lab.forest.sampled(made.node).ids
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 1
    held.setflags(write=True)
    held[0] = 1
    with pytest.raises(CaptureError, match="r7 segment 0 turn 0 token .*not those the engine received"):
        lab.forest.trajectory()


def test_the_callers_arrays_are_not_shared() -> None:
    forest = Forest("r")
    delta, sampled = row([1, 2, 3]), row([7, 8, 9])
    context = forest.extend(forest.plan(ModelRequest(messages=tuple(START)), "f"), delta)
    node = forest.commit(context, generation(ids=sampled), says("x"), turn=0)
    delta[:], sampled[:] = 0, 0
    assert forest.path_ids(node).tolist() == [1, 2, 3, 7, 8, 9]


@pytest.mark.case(39)
def test_a_chain_of_5000_turns_is_linear_in_memory_and_needs_no_recursion() -> None:
    forest, messages = long_chain(5000)
    found = forest.plan(Lab.request(messages), FINGERPRINT)
    assert found.base is not None
    assert forest.path_ids(found.base).tolist() == [1, 2, 3, 7, 8, 9] * 5000
    (segment,) = forest.trajectory().segments
    assert len(segment.ids) == 30_000
    assert segment.mask.sum() == 15_000
    held = sum(len(t.context_ids) + len(t.ids) for t in forest.trajectory().turns)
    assert held == len(segment.ids)


@pytest.mark.slow
@pytest.mark.case(39)
def test_1025_branches_from_one_turn() -> None:
    lab = Lab()
    first = says("", call("c0"))
    lab.turn(START, first)
    for branch in range(1025):
        made = lab.turn([*START, first, answer("c0", f"b{branch}")], says("x"))
        assert made.base is lab.calls[0]
    trajectory = lab.forest.trajectory()
    assert len(trajectory.segments) == 1025
    assert trajectory.ledger.trained == trajectory.ledger.captured == 3 * 1026
    assert sum(int(s.mask.sum()) for s in trajectory.segments) == 3 * 1026
