"""What a held token costs: at most 12 bytes, no text, and no work over the held context per call."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from capture_lab import FINGERPRINT, SHELL, START, Lab, answer, call, long_chain, says, user

from insitu.capture import digests as match
from insitu.capture.forest import Forest
from insitu.capture.message_history import DigestRun, Digests, History, RequestMemory
from insitu.capture.nodes import ContextNode, Nodes
from insitu.types import Generation, IntArray, Message, ModelRequest

TURNS, SAMPLED, CONTEXT = 200, 250, 250


def grow(forest: Forest, rng: np.random.Generator) -> int:
    """200 turns to 100,000 tokens, each request's messages parsed again; returns the tokens held."""
    messages: list[Message] = [*START]
    tokens = 0
    for turn in range(TURNS):
        reported = tuple(replace(m) for m in messages)
        plan = forest.plan(ModelRequest(messages=reported, tools=(SHELL,)), FINGERPRINT)
        delta: IntArray = rng.integers(0, 50_000, CONTEXT, dtype=np.int32)
        logprobs = np.full(SAMPLED, -0.5, dtype=np.float32)
        sampled: IntArray = rng.integers(0, 50_000, SAMPLED, dtype=np.int32)
        made = Generation(ids=sampled, logprobs=logprobs, finish="stop", version_runs=((0, 1),))
        reply = says("look " * 40, call(f"call_{turn:024}", f'{{"n":{turn}}}'), reasoning="think " * 40)
        forest.mark_delivered(forest.commit(forest.extend(plan, delta), made, reply, turn=turn))
        messages += [reply, answer(f"call_{turn:024}", f"line {turn}\n" * 100)]
        tokens += CONTEXT + SAMPLED
    return tokens


@pytest.mark.slow
def test_a_held_token_costs_at_most_12_bytes() -> None:
    rng = np.random.default_rng(0)
    grow(Forest("warm", b"k" * 32), rng)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        forest = Forest("r", b"k" * 32)
        tokens = grow(forest, rng)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert tokens == 100_000
    assert held / tokens <= 12
    assert forest.path_ids(len(forest) - 1).size == tokens


def test_each_spelling_of_arguments_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    canonical = match.canonical_arguments
    monkeypatch.setattr(
        match, "canonical_arguments", lambda text, *known: parsed.append(text) or canonical(text, *known)
    )
    lab = Lab()
    history = [*START]
    for index in range(20):
        said = says("", call(f"c{index}", f'{{"n": {index}}}'))
        lab.turn(history, said)
        history = [*history, says("", call(f"c{index}", f'{{"n":{index}}}')), answer(f"c{index}")]
    # as sampled, once more for its parts, and as echoed: never again in later requests
    assert len(parsed) <= 3 * 20


@pytest.mark.case(39)
def test_a_request_deep_in_a_long_line_looks_at_each_held_turn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forest, messages = long_chain(2000)
    looked = 0
    holds = Digests.contains

    def counted(self: Digests, run: DigestRun, start: int) -> bool:
        nonlocal looked
        looked += 1
        return holds(self, run, start)

    monkeypatch.setattr(Digests, "contains", counted)
    plan = forest.plan(Lab.request([*messages[:-1], user("another way")]), FINGERPRINT)
    assert plan.base is not None
    assert looked <= 2000 + 10


@pytest.mark.parametrize("retried", [False, True])
def test_a_request_that_begins_like_an_earlier_one_goes_on_where_that_ended(
    monkeypatch: pytest.MonkeyPatch, retried: bool
) -> None:
    """Also behind a prompt that was sampled twice: the other sample says something else for good."""
    lab = Lab("r", splices=True)
    looked = 0
    below = Nodes.below

    def counted(self: Nodes, root_key: str, base: int | None) -> list[ContextNode]:
        nonlocal looked
        looked += 1
        return below(self, root_key, base)

    messages = list(START)
    for turn in range(100):
        prompt = lab.ask(messages)
        if retried and turn == 40:
            lab.abort(lab.sample(lab.ask(messages), says("lost")))
        reply = says("look", call(f"call_{turn}", f'{{"n":{turn}}}'))
        lab.deliver(lab.sample(prompt, reply))
        messages += [reply, answer(f"call_{turn}", f"line {turn}")]
    memory, before = RequestMemory(), lab._asked[-1]
    known = History(
        tuple(messages[-2:]),
        memory,
        known=len(before[0]),
        before=before[1],
        parse=lambda: tuple(messages),
    )
    monkeypatch.setattr(Nodes, "below", counted)
    plan = lab.forest.plan(Lab.request(known), FINGERPRINT)
    assert plan.base is not None
    assert plan.replace == (messages[-1],)
    assert looked <= 5
