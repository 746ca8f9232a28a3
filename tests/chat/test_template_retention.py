"""Reasoning dropped where the rules drop it: what the engine is sent is the rules' own whole history.

The other mode, in which reasoning stays as it was sampled, is that of `test_splice`.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_lab import renderer_of
from render_families import HERMES, QWEN3_HEAD, QWEN3_REASONING, write_renderer
from test_template_splice import EXAMPLES, TOOL, other_spelling

from insitu.chat.model_files import read_folder
from insitu.chat.renderer import dropping_roles
from insitu.chat.template import TemplateRenderer, template_renderer
from insitu.chat.validation import CodecRenderer
from insitu.gateway.dialects.base import ParsedBody
from insitu.gateway.request import GatewayConfig
from insitu.gateway.server import Gateway
from insitu.gateway.token_backend import TokenBackend, TokenSession
from insitu.types import IntArray, Limits, Message, ModelRequest, RequestKey, ToolCall, Trajectory
from insitu_bridges.renderers_adapter import AdaptedRenderer, render
from insitu_lab.exactness import training_faults
from insitu_train.demo.scripted import ScriptedEngine

pytestmark = pytest.mark.slow

DROPPING = ("qwen3", "qwen3.5", "glm-4.5", "glm-5.1", "deepseek-r1", "template")


@pytest.fixture(params=DROPPING)
def chat_renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CodecRenderer:
    if request.param == "template":
        head, tail = QWEN3_HEAD, QWEN3_REASONING
        return template_renderer(read_folder(write_renderer(tmp_path_factory.mktemp("m"), head + tail)))
    return renderer_of(request.param, request.config.cache.mkdir("insitu"))


def stock(chat_renderer: CodecRenderer, messages: list[Message]) -> list[int]:
    """The rules' own prompt for a whole history."""
    if isinstance(chat_renderer, TemplateRenderer):
        text = chat_renderer.template.render(messages, [TOOL], generation_prompt=True)
        return chat_renderer.codec.encode(text).tolist()
    assert isinstance(chat_renderer, AdaptedRenderer)
    return render(chat_renderer, messages, [TOOL], prompt=True)[0].tolist()


class Talk:
    """A conversation of one session, with replies made ahead and echoes that keep or drop reasoning."""

    def __init__(self, chat_renderer: CodecRenderer, seed: int) -> None:
        self.renderer, self.rng = chat_renderer, random.Random(seed)
        self.history = [Message(role="system", text="Rules."), Message(role="user", text="q0")]
        """As the model said it."""
        self.request = ModelRequest(messages=tuple(self.history), tools=(TOOL,))
        self.questions = 0
        self.odd = False
        self.engine = ScriptedEngine(chat_renderer, self._say, sampled=True)

    def _say(self, ids: IntArray, key: RequestKey) -> IntArray:
        calls = (ToolCall(id="", name="read", arguments='{"path": "a"}'),) if self.rng.random() < 0.6 else ()
        text = "" if calls and not self.renderer.caps.text_with_calls else f"I say {key.turn} so"
        said = Message(role="assistant", text=text, reasoning=f"Hm {key.turn}.", tool_calls=calls)
        ids = self.renderer.render_reply(said)
        return other_spelling(self.renderer, ids, self.rng) if self.odd else ids

    async def run(self, steps: int) -> Trajectory:
        limits = Limits(
            wall_s=600,
            max_calls=10_000,
            max_call_tokens=1 << 20,
            max_session_tokens=1 << 24,
            max_context_tokens=1 << 24,
        )
        config = GatewayConfig(inline_chars=1 << 20, keep_reasoning="template")
        session = Gateway(TokenBackend(self.engine, self.renderer), config).open_session("r", limits=limits)
        assert isinstance(session, TokenSession)
        for turn in range(steps):
            call = session.admit(ParsedBody(request=self.request))
            said = await call.task
            call.delivered()
            reported = Message(
                role="assistant", text=said.text, reasoning=said.reasoning, tool_calls=said.tool_calls
            )
            run = [Message(role="tool", text=f"r{turn}", tool_call_id=c.id) for c in said.tool_calls]
            if not run or self.rng.random() < 0.3:
                self.questions += 1
                run.append(Message(role="user", text=f"q{self.questions}"))
            echo = reported if self.rng.random() < 0.5 else replace(reported, reasoning="")
            self.history += [reported, *run]
            self.request = replace(self.request, messages=(*self.request.messages, echo, *run))
        assert session.stats.edited == 0
        return session.forest.trajectory()


@pytest.mark.fuzz
@pytest.mark.case(9)
def test_prompts_are_the_rules_own_and_every_token_is_trained_once(chat_renderer: CodecRenderer) -> None:
    @settings(max_examples=EXAMPLES * 2, database=None)
    @given(st.integers(0, 2**32), st.integers(1, 7))
    def prove(seed: int, steps: int) -> None:
        talk = Talk(chat_renderer, seed)
        trajectory = asyncio.run(talk.run(steps))
        at = 2
        for sent in talk.engine.sent:
            assert sent.ids.tolist() == stock(chat_renderer, talk.history[:at])
            at = next((i for i in range(at + 1, len(talk.history)) if _speaks(talk, i)), len(talk.history))
        assert list(training_faults(trajectory, {k.turn: a for k, a in talk.engine.answers.items()})) == []
        assert trajectory.ledger.trained == trajectory.ledger.captured
        assert {note.cause for note in trajectory.drifts} <= {"retention"}

    prove()


def _speaks(talk: Talk, index: int) -> bool:
    return talk.history[index].role == "assistant"


@pytest.mark.case(9)
def test_within_a_question_the_sampled_spelling_stands(chat_renderer: CodecRenderer) -> None:
    """Whatever tokens were sampled, a branch goes on from them until a message drops their reasoning."""
    for seed in range(3):
        talk = Talk(chat_renderer, seed)
        talk.odd = True
        trajectory = asyncio.run(talk.run(6))
        assert list(training_faults(trajectory, {k.turn: a for k, a in talk.engine.answers.items()})) == []
        assert trajectory.ledger.trained == trajectory.ledger.captured
        answers = {k.turn: a.ids.tolist() for k, a in talk.engine.answers.items()}
        for turn in trajectory.turns:
            if turn.parent < 0:
                continue
            before = answers[turn.parent]
            sent = talk.engine.sent[turn.index].ids.tolist()
            start = len(talk.engine.sent[turn.parent].ids)
            assert sent[start : start + len(before)] == before


def test_rules_that_keep_reasoning_drop_it_nowhere(tmp_path: Path) -> None:
    assert dropping_roles(template_renderer(read_folder(write_renderer(tmp_path, HERMES)))) == frozenset()
