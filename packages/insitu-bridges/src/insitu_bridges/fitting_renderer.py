"""Which rules of the `renderers` package fit a model folder.

Those that write the same text as the folder's own chat template on probe conversations.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping

from insitu.chat.codec import Codec
from insitu.chat.jinja import ChatTemplate
from insitu.chat.model_files import ModelFiles
from insitu.chat.validation import PROBE_TOOL, check_renderer
from insitu.errors import RenderError
from insitu.types import Message, ToolCall
from insitu_bridges.renderers_adapter import KNOWN, AdaptedRenderer, adapted_renderer, render


def named_renderer(name: str, codec: Codec, files: ModelFiles) -> AdaptedRenderer:
    """Return the rules of a name, checked. Raises RenderError."""
    return _checked(name, codec, files.renderer.template_arguments)


def fitting_renderer(codec: Codec, files: ModelFiles, rejected: list[str]) -> AdaptedRenderer | None:
    """Return the first rules that fit; `rejected` gets a line for each that does not."""
    for name, settings in _candidates(files):
        try:
            found = _checked(name, codec, {**settings, **files.renderer.template_arguments})
            _check_same_as_template(found, files, settings)
        except RenderError as error:
            rejected.append(f"{name}: {error}")
        else:
            return found
    return None


def _checked(name: str, codec: Codec, arguments: Mapping[str, object]) -> AdaptedRenderer:
    found = adapted_renderer(name, codec, arguments)
    check_renderer(found)
    return found


def _candidates(files: ModelFiles) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield renderers whose marker text occurs in the folder's template, with settings to try.

    A template that writes the date gets today's, fixed for the lifetime of the renderer.
    """
    for name, known in KNOWN.items():
        if files.template is None or known.template_marker not in files.template:
            continue
        yield name, dict(known.settings)
        if name == "llama-3" and "strftime_now" in files.template:
            today = datetime.datetime.now().strftime("%d %b %Y")
            yield name, {**dict(known.settings), "date_string": today}


def _check_same_as_template(
    renderer: AdaptedRenderer, files: ModelFiles, settings: Mapping[str, object]
) -> None:
    """Raise RenderError where the rules and the folder's template write different text."""
    if files.template is None:
        return
    arguments = {**settings, **files.renderer.template_arguments}
    template = ChatTemplate(files.template, {**files.special_tokens, **arguments}, renderer.codec.shield)
    user, system = Message(role="user", text="Question."), Message(role="system", text="Rules.")
    call = ToolCall(id="call_a", name="look", arguments='{"path": "a b", "n": 3}')
    called = Message(role="assistant", tool_calls=(call,))
    result = Message(role="tool", text="result", tool_call_id="call_a")
    for messages in (
        [user],
        [system, user],
        [system, user, called, result],
        [user, Message(role="assistant", text="Answer."), user],
    ):
        for tools in ((), (PROBE_TOOL,)):
            adapted = renderer.codec.decode_marked(render(renderer, messages, tools, prompt=True)[0])
            original = template.render(messages, tools, generation_prompt=True)
            if renderer.codec.unshield(adapted) != renderer.codec.unshield(original):
                roles = " ".join(m.role for m in messages)
                raise RenderError(f"output differs from the folder's chat template for: {roles}")
