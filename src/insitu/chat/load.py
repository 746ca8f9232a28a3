"""A Family for a model folder: rules of the `renderers` package where they write what the folder's own chat
template writes, else that template by the delta rule. Callers: whoever builds a gateway.

The choice is made on ids and text, never on a model's name: fine-tunes often carry another template.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from insitu.chat.codec import Codec
from insitu.chat.jinja import ChatTemplate
from insitu.chat.model_files import ModelFiles, read_folder
from insitu.chat.renderers_adapter import KNOWN, AdaptedRenderer, adapted_renderer, render
from insitu.chat.template import template_renderer
from insitu.chat.validation import PROBE_TOOL, Coded, check_renderer
from insitu.errors import RenderError
from insitu.types import Message, ToolCall

log = logging.getLogger("insitu.chat")


def load_renderer(folder: Path, renderer: str = "auto") -> Coded:
    """The family of a model folder, checked. `family`: auto, template, or a name in render/known.

    Raises RenderError with the reason for a refusal.
    """
    files = read_folder(folder)
    codec = Codec(files.tokenizer_json, files.renderer.control_tokens)
    if renderer == "template":
        return template_renderer(files, codec)
    if renderer != "auto":
        return _known(renderer, codec, files.renderer.template_arguments)
    refused = []
    for name, settings in _candidates(files):
        try:
            found = _known(name, codec, {**settings, **files.renderer.template_arguments})
            _same_as_template(found, files, settings)
        except RenderError as error:
            refused.append(f"{name}: {error}")
            continue
        log.info("family chosen folder=%s family=%s", folder, name)
        return found
    try:
        chosen = template_renderer(files, codec)
    except RenderError as error:
        raise RenderError("; ".join([f"template: {error}", *refused])) from error
    log.info("family chosen folder=%s family=template refused=%r", folder, refused)
    return chosen


def _known(name: str, codec: Codec, arguments: Mapping[str, object]) -> AdaptedRenderer:
    found = adapted_renderer(name, codec, arguments)
    check_renderer(found)
    return found


def _candidates(files: ModelFiles) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Rules worth loading the package for, and settings to try them with: the folder's template has what is
    typical of them. A template that writes the date gets today's, frozen for as long as the family lives."""
    for name, known in KNOWN.items():
        if files.template is None or known.telltale not in files.template:
            continue
        yield name, dict(known.settings)
        if name == "llama-3" and "strftime_now" in files.template:
            today = datetime.datetime.now().strftime("%d %b %Y")
            yield name, {**dict(known.settings), "date_string": today}


def _same_as_template(renderer: AdaptedRenderer, files: ModelFiles, settings: Mapping[str, object]) -> None:
    """The rules write what the folder's template writes. Raises RenderError where they do not."""
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
            ours = renderer.codec.decode_marked(render(renderer, messages, tools, prompt=True)[0])
            own = template.render(messages, tools, generation_prompt=True)
            if renderer.codec.unshield(ours) != renderer.codec.unshield(own):
                told = " ".join(m.role for m in messages)
                raise RenderError(f"writes another text than the folder's chat template for: {told}")
