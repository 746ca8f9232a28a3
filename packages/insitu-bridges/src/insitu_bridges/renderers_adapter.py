"""The hand-written rules of the `renderers` package (extra `renderers`) as a ChatRenderer.

The package gets a substitute tokenizer: what it writes itself becomes scaffold, outside text was shielded
before and stays text. It never renders a history: a run of messages is rendered behind one or two dummy
messages, whose tokens are cut off, so the cost is the new text and sampled ids are never rewritten. Its
bridges (O(context)) serve as an oracle in tests only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from insitu.chat.codec import Codec
from insitu.chat.jinja import TemplateInputs, fitting_inputs
from insitu.chat.parse import THINK_CLOSE, THINK_OPEN
from insitu.chat.renderer import Capabilities, RootCache, prepared
from insitu.chat.token_rules import TokenRules
from insitu.chat.tool_formats import is_open_reasoning
from insitu.chat.validation import find_capabilities
from insitu.errors import ConfigError, RenderError
from insitu.install_hints import install_extra
from insitu.types import IntArray, Message, Role, ToolCall, ToolSpec
from insitu_bridges.versions import Need, check

CREATE = Need(("renderers:create_renderer",))
CONFIGS = Need(("renderers.configs:BaseRendererConfig",))
_SCAFFOLD_CHARS = 48
_USER = Message(role="user", text="Question.")
_REPLY = Message(role="assistant", text="Answer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownRenderer:
    """Rules of the package that insitu offers."""

    tool_format: str
    template_marker: str
    """Text in every chat template that these rules could match; otherwise `auto` skips them."""
    settings: tuple[tuple[str, object], ...] = ()
    """Required arguments of the package's config."""


KNOWN: Mapping[str, _KnownRenderer] = {
    "qwen3": _KnownRenderer(
        tool_format="hermes", template_marker="You may call one or more functions to assist"
    ),
    "qwen3.5": _KnownRenderer(tool_format="xml", template_marker="<function=example_function_name>"),
    "qwen3.6": _KnownRenderer(tool_format="xml", template_marker="<function=example_function_name>"),
    "qwen3.8": _KnownRenderer(tool_format="xml", template_marker="<function=example_function_name>"),
    "prime-qwen3": _KnownRenderer(tool_format="xml", template_marker="<function=example_function_name>"),
    "glm-4.5": _KnownRenderer(tool_format="glm", template_marker="[gMASK]<sop>"),
    "glm-5": _KnownRenderer(tool_format="glm", template_marker="[gMASK]<sop>"),
    "glm-5.1": _KnownRenderer(tool_format="glm", template_marker="[gMASK]<sop>"),
    "glm-5.3": _KnownRenderer(tool_format="glm", template_marker="[gMASK]<sop>"),
    "deepseek-v3": _KnownRenderer(
        tool_format="deepseek", template_marker="<\uff5ctool\u2581calls\u2581begin\uff5c>"
    ),
    "deepseek-r1": _KnownRenderer(
        tool_format="deepseek", template_marker="<\uff5ctool\u2581calls\u2581begin\uff5c>"
    ),
    "kimi-k2": _KnownRenderer(tool_format="kimi", template_marker="<|im_middle|>"),
    # The tools belong to the root block, which must not depend on the first user message.
    "llama-3": _KnownRenderer(
        tool_format="llama",
        template_marker="<|start_header_id|>",
        settings=(("tools_in_user_message", False),),
    ),
}
"""Supported rules by the package's own names."""


class _Rendered(Protocol):
    token_ids: list[int]
    message_indices: list[int]


class _Renderer(Protocol):
    def render(
        self,
        messages: list[dict[str, object]],
        *,
        tools: list[dict[str, object]] | None = None,
        add_generation_prompt: bool = False,
    ) -> _Rendered: ...

    def get_stop_token_ids(self) -> list[int]: ...


class _CodecTokenizer:
    """Tokenizer that the package sees: its own text becomes scaffold, shielded text becomes content."""

    name_or_path = ""
    unk_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._scaffold = lru_cache(maxsize=1024)(lambda text: tuple(codec.encode(text).tolist()))

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        # Every rendering writes the same role names, line breaks and dummies.
        if len(text) <= _SCAFFOLD_CHARS:
            return list(self._scaffold(text))
        ids: list[int] = self._codec.encode(text).tolist()
        return ids

    def decode(self, token_ids: Sequence[int], *_: object, **__: object) -> str:
        return self._codec.decode_marked(np.array(token_ids, dtype=np.int32))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._codec.control.get(token)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AdaptedRenderer(TokenRules):
    """Implements `ChatRenderer` over the package's rules; made by `adapted_renderer`, immutable."""

    renderer: _Renderer
    inputs: TemplateInputs
    prompts: Mapping[bool, IntArray]
    """Generation prompts after tool results (True) and after anything else (False)."""

    def _root(self, system: Sequence[Message], tools: Sequence[ToolSpec]) -> IntArray:
        ids, index = render(self, [*system, _USER], tools)
        start = index.index(len(system))
        if not np.array_equal(ids[start:], self.append([_USER])):
            raise RenderError("these rules render the first user message differently from later ones")
        return ids[:start].copy()

    def append(self, messages: Sequence[Message]) -> IntArray:
        if not messages:
            return np.zeros(0, dtype=np.int32)
        run = prepared(messages, self.caps)
        before = _before(run)
        ids, index = render(self, [*before, *run])
        start = next((i for i, owner in enumerate(index) if owner >= len(before)), len(index))
        # Where an opener ends the turn before it, the package assigns it to that turn.
        return ids[start - (self.caps.open_ended and len(before) > 1) :]

    def generation_prompt(self, after: Role = "user") -> IntArray:
        return self.prompts[after == "tool"]

    def render_reply(self, message: Message) -> IntArray:
        if message.role != "assistant":
            raise RenderError(f"render_reply takes an assistant message, not {message.role!r}")
        reply = self.codec.encode(self._behind_prompt(message))
        if self.caps.open_ended:
            return np.append(reply, self._opener(message)).astype(np.int32)
        after = len(self.end_ids) - 1
        if len(reply) <= after or int(reply[len(reply) - 1 - after]) not in self.stop_ids:
            raise RenderError("these rules end this reply differently from others")
        return reply[: len(reply) - after]

    def _behind_prompt(self, message: Message) -> str:
        """Return the marked text of a reply without the generation prompt."""
        # Text, not ids: the prompt may end inside what the whole rendering writes with one token.
        text = self.codec.decode_marked(render(self, [_USER, *prepared([message], self.caps)])[0])
        before = self.codec.decode_marked(render(self, [_USER])[0])
        prompt = self.codec.decode_marked(self.prompts[False])
        if text.startswith(before + prompt):
            return text[len(before) + len(prompt) :]
        # The prompt opens reasoning, and the rules omit it from a finished turn.
        head, opened, _ = prompt.partition(THINK_OPEN)
        if not opened or not text.startswith(before + head):
            raise RenderError("these rules do not write this reply after their own generation prompt")
        rest = text[len(before) + len(head) :]
        if rest.startswith(THINK_CLOSE):
            return rest
        return f"{self.codec.shield(message.reasoning)}\n{THINK_CLOSE}\n\n{rest}"

    def _opener(self, reply: Message) -> int:
        """Return the opener that a model samples after `reply`, where openers end turns."""
        calls = reply.tool_calls
        follower = Message(role="tool", text="x", tool_call_id=calls[0].id) if calls else _USER
        return int(self.append([follower])[0])


def render(
    chat_renderer: AdaptedRenderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    *,
    prompt: bool = False,
) -> tuple[IntArray, list[int]]:
    """Return (ids, message index of each id); raise RenderError if the package rejects the messages."""
    try:
        rendered = chat_renderer.renderer.render(
            [chat_renderer.inputs.message(m) for m in messages],
            tools=[chat_renderer.inputs.tool(t) for t in tools] or None,
            add_generation_prompt=prompt,
        )
    except (ValueError, TypeError, KeyError, NotImplementedError, RecursionError) as error:
        raise RenderError(
            f"the {chat_renderer.caps.source} rules reject the conversation: {error}"
        ) from error
    return np.array(rendered.token_ids, dtype=np.int32), rendered.message_indices


def _before(run: Sequence[Message]) -> list[Message]:
    """Return a shortest plausible conversation that `run` can follow."""
    answered = []
    for message in run:
        if message.role != "tool":
            break
        answered.append(ToolCall(id=message.tool_call_id or "call", name="tool", arguments="{}"))
    return [_USER, Message(role="assistant", tool_calls=tuple(answered[:1]))] if answered else [_USER]


# --------------------------------------------------------------------------- loading


def adapted_renderer(
    name: str, codec: Codec, arguments: Mapping[str, object] = MappingProxyType({})
) -> AdaptedRenderer:
    """Return the package's rules `name` over this tokenizer, with `arguments` for their config.

    The result is not yet checked (`validation.check_renderer`). Raises RenderError if the rules do not fit.
    """
    if name not in KNOWN:
        raise RenderError(f"unknown renderer {name!r}; known: {', '.join(sorted(KNOWN))}")
    known = KNOWN[name]
    settings = {**dict(known.settings), **arguments}
    renderer = _renderer(name, settings, codec)
    stops = frozenset(int(i) for i in renderer.get_stop_token_ids())
    caps = Capabilities(
        source=name,
        tool_format=known.tool_format,
        tools=True,
        native_system=True,
        parallel_calls=True,
        text_with_calls=True,
        reasoning=False,
    )
    draft = AdaptedRenderer(
        fingerprint=_fingerprint(codec, name, settings),
        codec=codec,
        caps=caps,
        renderer=renderer,
        inputs=TemplateInputs(codec.shield),
        stop_ids=stops,
        end_ids=(),
        prompts={},
        in_reasoning=False,
        roots=RootCache(),
    )

    def shown(inputs: TemplateInputs, messages: Sequence[Message]) -> str:
        return codec.decode(render(replace(draft, inputs=inputs), messages)[0])

    return _derive(replace(draft, inputs=fitting_inputs(codec.shield, shown)))


def _derive(draft: AdaptedRenderer) -> AdaptedRenderer:
    """Fill in ends, prompts, stop ids and capabilities from what the rules write."""
    ids, index = render(draft, [_USER, _REPLY])
    ends = [i for i, token in enumerate(ids) if int(token) in draft.stop_ids and index[i] == 1]
    prompts: dict[bool, IntArray] = {}
    tool = Message(role="tool", text="x", tool_call_id="call")
    for after, messages in ((False, [_USER]), (True, [*_before([tool]), tool])):
        without, whole = render(draft, messages)[0], render(draft, messages, prompt=True)[0]
        if not np.array_equal(whole[: len(without)], without):
            raise RenderError(f"the {draft.caps.source} rules change a message before a generation prompt")
        prompts[after] = whole[len(without) :]
    chat_renderer = replace(
        draft,
        end_ids=tuple(int(i) for i in ids[ends[-1] :]) if ends else (),
        prompts=prompts,
        in_reasoning=is_open_reasoning(draft.codec, prompts[False], False),
        caps=replace(draft.caps, open_ended=not ends),
    )
    pieces = [*prompts.values(), chat_renderer.append([_USER]), chat_renderer.append([tool])]
    openers = {int(piece[0]) for piece in pieces if len(piece)} & set(chat_renderer.codec.names)
    chat_renderer = replace(chat_renderer, stop_ids=chat_renderer.stop_ids | openers)
    return replace(chat_renderer, caps=find_capabilities(chat_renderer))


def _renderer(name: str, settings: Mapping[str, object], codec: Codec) -> _Renderer:
    """Return the package's renderer over an insitu tokenizer; raise RenderError if it cannot be made."""
    try:
        package, configs = import_module("renderers"), import_module("renderers.configs")
    except ImportError as error:
        raise RenderError(f"this renderer needs an extra: {install_extra('renderers')} ({error})") from error
    _found()
    kinds: dict[str, Any] = {
        kind.model_fields["name"].default: kind
        for kind in vars(configs).values()
        if hasattr(kind, "model_fields") and "name" in kind.model_fields
    }
    with _render_errors(name):
        config = kinds[name](**settings)
        made: _Renderer = package.create_renderer(_CodecTokenizer(codec), config)
    return made


@cache
def _found() -> str:
    """Return the installed version of the package. Raises RenderError."""
    try:
        found = check("renderers", CREATE, CONFIGS)
    except ConfigError as error:
        raise RenderError(str(error)) from error
    if not found:
        raise RenderError(f"this renderer needs an extra: {install_extra('renderers')}")
    return found


@contextmanager
def _render_errors(name: str) -> Iterator[None]:
    """Convert the package's failures on a foreign tokenizer into RenderError."""
    # The package checks its tokens with assertions and fails in many ways on a foreign tokenizer.
    try:
        yield
    except (AssertionError, LookupError, TypeError, ValueError, RuntimeError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise RenderError(f"the {name} rules do not fit this tokenizer: {reason}") from error


def _fingerprint(codec: Codec, name: str, settings: Mapping[str, object]) -> str:
    rules = f"renderers {_found()} {name} {json.dumps(settings, sort_keys=True)}"
    return hashlib.sha256(f"{codec.identity}\0{rules}".encode()).hexdigest()
