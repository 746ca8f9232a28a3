"""A ChatRenderer from a model folder: its tokenizer.json and its own chat template, by the delta rule.

The ids of a run of context messages are what the template writes for a conversation with the run minus what
it writes without it. A sentinel inside the message before the run marks where to compare, so a template may
restyle older messages; the tail it writes must not depend on them. `template_renderer` checks that on probe
conversations and raises RenderError otherwise. Every piece begins with a control token, so that pieces
encoded separately equal the whole encoded at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from insitu.chat.codec import Codec
from insitu.chat.jinja import SENTINEL, ChatTemplate
from insitu.chat.model_files import ModelFiles, RendererFile
from insitu.chat.renderer import Capabilities, RootCache, prepared
from insitu.chat.token_rules import TokenRules
from insitu.chat.tool_formats import FORMATS, NO_CALLS, is_open_reasoning, spelled_marks
from insitu.chat.validation import PROBE_CALL, find_capabilities, round_trips
from insitu.errors import RenderError
from insitu.types import IntArray, Message, Role, ToolCall, ToolSpec

_USER = Message(role="user", text="Question.")
_REPLY = Message(role="assistant", text=SENTINEL)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TemplateRenderer(TokenRules):
    """Implements `ChatRenderer` over a chat template; made by `template_renderer`, immutable."""

    template: ChatTemplate
    prompt_ids: IntArray
    prompt_text: str
    tails: dict[int, str]
    """Text between the sentinel and a run, by the number of tool results that begin the run.

    Only filled where the text does not depend on their ids.
    """

    def _root(self, system: Sequence[Message], tools: Sequence[ToolSpec]) -> IntArray:
        return self.codec.encode(_root(self.template, system, tools))

    def append(self, messages: Sequence[Message]) -> IntArray:
        if not messages:
            return np.zeros(0, dtype=np.int32)
        run = prepared(messages, self.caps)
        return self.codec.encode(
            _opens(self.codec, _delta(self.template, run, tails=self.tails), run[0].role)
        )

    def generation_prompt(self, after: Role = "user") -> IntArray:
        return self.prompt_ids

    def render_reply(self, message: Message) -> IntArray:
        if message.role != "assistant":
            raise RenderError(f"render_reply takes an assistant message, not {message.role!r}")
        text = self.template.render([_USER, *prepared([message], self.caps)])
        before = self.template.render([_USER]) + self.prompt_text
        if not text.startswith(before):
            raise RenderError("the template does not write this reply after its own generation prompt")
        ids = self.codec.encode(text[len(before) :])
        if tuple(ids[len(ids) - len(self.end_ids) :].tolist()) != self.end_ids:
            raise RenderError("the template ends this reply differently from others")
        return ids[: len(ids) - len(self.end_ids) + 1]


def _root(template: ChatTemplate, system: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
    """Return what the template writes before the first user message."""
    whole = template.render([*system, _USER], tools)
    first = _delta(template, [_USER])
    if not whole.endswith(first):
        raise RenderError("the template renders the first user message differently from later ones")
    return whole[: len(whole) - len(first)]


def _answered(run: Sequence[Message]) -> list[str]:
    """Return the ids of the calls whose results begin the run."""
    return [m.tool_call_id or "call" for m in takewhile(lambda m: m.role == "tool", run)]


def _before(called: Sequence[str]) -> list[Message]:
    """Return a shortest plausible conversation that a run can follow, the sentinel in its last message."""
    if called:
        calls = tuple(ToolCall(id=name, name=SENTINEL, arguments="{}") for name in called)
        return [_USER, Message(role="assistant", tool_calls=calls)]
    return [_USER, _REPLY]


def _delta(
    template: ChatTemplate,
    run: Sequence[Message],
    before: Sequence[Message] = (),
    tails: dict[int, str] | None = None,
) -> str:
    """Return render(before + run) - render(before), compared from the last sentinel on."""
    called = _answered(run)
    tail = tails.get(len(called)) if tails is not None else None
    before = before or _before(called)
    without = tail if tail is not None else _after_sentinel(template.render(before))
    whole = _after_sentinel(template.render([*before, *run]))
    if not whole.startswith(without):
        raise RenderError(
            f"not prefix-stable: a following {run[0].role} message changes the end of the one before"
        )
    if tails is not None and tail is None and _same_for_all(template, called, without):
        tails[len(called)] = without
    return whole[len(without) :]


def _same_for_all(template: ChatTemplate, called: Sequence[str], tail: str) -> bool:
    """Return whether the template writes this tail for any call ids."""
    try:
        tails = {
            _after_sentinel(template.render(_before([f"{name}{i}" for i in range(len(called))])))
            for name in ("a", "call_0123456789abcdef")
        }
    except RenderError:  # the template accepts only ids of a certain form
        return False
    return tails == {tail}


def _after_sentinel(text: str) -> str:
    at = text.rfind(SENTINEL)
    if at < 0:
        raise RenderError("the template leaves out or changes an assistant message's content or tool calls")
    return text[at + len(SENTINEL) :]


def _opens(codec: Codec, text: str, role: str) -> str:
    """Return `text` if it begins with a control token, else raise RenderError."""
    if not any(text.startswith(name) for name in codec.control):
        raise RenderError(
            f"a {role} message does not begin with a control token in this template: {text[:40]!r}"
        )
    return text


# --------------------------------------------------------------------------- loading


def template_renderer(files: ModelFiles, codec: Codec | None = None) -> TemplateRenderer:
    """Build a renderer from the files and check it by the delta rule; raise RenderError if it fails."""
    if files.template is None:
        raise RenderError(
            f"{files.folder} has no chat template (chat_template.jinja or tokenizer_config.json)"
        )
    file = files.renderer
    codec = codec or Codec(files.tokenizer_json, file.control_tokens)
    template = ChatTemplate(files.template, {**files.special_tokens, **file.template_arguments}, codec.shield)
    chat_renderer = _build(codec, template, file, _fingerprint(codec, template, file))
    _check_renderer(chat_renderer)
    return chat_renderer


def _fingerprint(codec: Codec, template: ChatTemplate, file: RendererFile) -> str:
    return hashlib.sha256(f"{codec.identity}\0{template.identity}\0{file!r}".encode()).hexdigest()


def _build(codec: Codec, template: ChatTemplate, file: RendererFile, fingerprint: str) -> TemplateRenderer:
    """Derive generation prompt, end of turn and stop ids from what the template writes."""
    user = template.render([_USER])
    prompted = template.render([_USER], generation_prompt=True)
    if not prompted.startswith(user) or prompted == user:
        raise RenderError("the template has no generation prompt that follows a user message")
    prompt_text = _opens(codec, prompted[len(user) :], "assistant")
    prompt_ids = codec.encode(prompt_text)
    end_ids = [int(i) for i in codec.encode(_after_sentinel(template.render([_USER, _REPLY])))]
    if not end_ids or end_ids[0] not in codec.names:
        raise RenderError("an assistant message does not end with a control token in this template")
    openers = [int(prompt_ids[0]), int(codec.encode(_opens(codec, _delta(template, [_USER]), "user"))[0])]
    eos = template.variables.get("eos_token")
    named = [*file.stop_tokens, *([eos] if isinstance(eos, str) else [])]
    unknown = sorted(set(named) - set(codec.control))
    if unknown:
        raise RenderError(f"stop tokens {unknown} are not control tokens of this tokenizer")
    chat_renderer = TemplateRenderer(
        fingerprint=fingerprint,
        codec=codec,
        template=template,
        stop_ids=frozenset([end_ids[0], *openers, *(codec.control[n] for n in named)]),
        end_ids=tuple(end_ids),
        prompt_ids=prompt_ids,
        prompt_text=prompt_text,
        in_reasoning=is_open_reasoning(codec, prompt_ids, False),
        caps=Capabilities(
            source="template",
            tool_format=file.tool_format or "hermes",
            tools=True,
            native_system=True,
            parallel_calls=True,
            text_with_calls=True,
            reasoning=True,
        ),
        roots=RootCache(),
        tails={},
    )
    return _with_format(chat_renderer, file)


def _with_format(chat_renderer: TemplateRenderer, file: RendererFile) -> TemplateRenderer:
    """Return the renderer with the first tool format that parses the template's calls, else without tools."""
    call = Message(role="assistant", tool_calls=(PROBE_CALL,))
    why = "its chat template leaves out a call or its result"
    if _writes_calls(chat_renderer.template):
        why = "no tool format reads the calls that its chat template writes"
        for name in [file.tool_format] if file.tool_format else FORMATS:
            candidate = replace(chat_renderer, caps=replace(chat_renderer.caps, tool_format=name))
            try:
                if round_trips(candidate, call):
                    return replace(candidate, caps=find_capabilities(candidate))
            except RenderError as error:
                _check_renderer(chat_renderer)  # names the reason where it also holds for a history
                why = str(error)
                break
        if marks := spelled_marks(chat_renderer.codec, chat_renderer.template.source):
            why += f": {', '.join(marks)} must be added tokens of tokenizer.json"
    if file.tool_format not in ("", NO_CALLS):
        raise RenderError(f"insitu_renderer.json: tool_format {file.tool_format} does not fit: {why}")
    return _without_tools(chat_renderer, why)


def _without_tools(chat_renderer: TemplateRenderer, why: str) -> TemplateRenderer:
    plain = replace(chat_renderer, caps=replace(chat_renderer.caps, tool_format=NO_CALLS))
    return replace(plain, caps=replace(find_capabilities(plain), tools=False, no_tools=why))


def _writes_calls(template: ChatTemplate) -> bool:
    """Return whether the template writes calls and results."""
    call = replace(PROBE_CALL, name=SENTINEL)
    result = Message(role="tool", text="The result.", tool_call_id=call.id)
    try:
        text = template.render([_USER, Message(role="assistant", tool_calls=(call,)), result])
    except RenderError:
        return False
    return SENTINEL in text and result.text in text


def _check_renderer(chat_renderer: TemplateRenderer) -> None:
    """Check the delta rule on probe conversations; raise RenderError with the first failure."""
    template, codec = chat_renderer.template, chat_renderer.codec
    call = ToolCall(id="call_a", name=SENTINEL, arguments='{"a": 1}')
    replies = [
        [_USER, _REPLY],
        [Message(role="system", text="Rules."), _USER, Message(role="assistant", text="x"), _USER, _REPLY],
    ]
    called: list[list[Message]] = []
    if chat_renderer.caps.tool_format != NO_CALLS:
        called.append([_USER, Message(role="assistant", tool_calls=(call,))])
        called.append([*replies[1], _USER, Message(role="assistant", text="y", tool_calls=(call,))])
    result = Message(role="tool", text="result", tool_call_id="call_a")
    runs: list[tuple[list[Message], list[list[Message]]]] = [
        ([_USER], replies + called),
        ([_USER, _USER], replies),
        ([result], called),
        ([result, _USER], called),
    ]
    for run, contexts in (pair for pair in runs if pair[1]):
        deltas = {_delta(template, run, before) for before in contexts}
        if len(deltas) != 1:
            raise RenderError(f"not prefix-stable: a {run[0].role} message depends on the messages before it")
        delta = _opens(codec, deltas.pop(), run[0].role)
        if template.render([_USER, *run], generation_prompt=True) != (
            template.render([_USER, *run]) + chat_renderer.prompt_text
        ):
            raise RenderError(f"the generation prompt depends on the {run[-1].role} message before it")
        if not np.array_equal(codec.encode(delta), codec.encode_stock(delta)):
            raise RenderError(
                "the tokenizer encodes runs between control tokens differently from the whole text"
            )
    tool = ToolSpec(name="look", description="Look.", parameters='{"type": "object", "properties": {}}')
    for system in ([], [Message(role="system", text="Rules.")]):
        _root(template, system, ())
        _root(template, system, (tool,))
    chat_renderer.render_reply(Message(role="assistant", text="Answer."))
