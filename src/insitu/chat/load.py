"""Choose the ChatRenderer of a model folder.

Rules of the `renderers` package (insitu-bridges) are used where they write the same text as the folder's own
chat template, else that template itself by the delta rule. The choice depends on ids and text, never on a
model's name: fine-tunes often carry another template.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

from insitu.chat.codec import Codec
from insitu.chat.model_files import ModelFiles, read_folder
from insitu.chat.template import template_renderer
from insitu.chat.validation import CodecRenderer
from insitu.errors import ConfigError, RenderError, boundary
from insitu.registry import find

log = logging.getLogger("insitu.chat")


def load_renderer(folder: Path, renderer: str = "auto") -> CodecRenderer:
    """Load and check the renderer of a model folder.

    `renderer`: auto, template, hermes (the template of a folder that `config.model_folder` made), or a name
    of the `renderers` package; behind a "?" arguments of the chat template, as NAME=JSON&... Raises
    RenderError if none passes its checks.
    """
    renderer, _, query = renderer.partition("?")
    files = _with_arguments(read_folder(folder), query)
    codec = Codec(files.tokenizer_json, files.renderer.control_tokens)
    if renderer in ("template", "hermes"):
        return template_renderer(files, codec)
    if renderer != "auto":
        named: CodecRenderer = find("parts", "named_renderer")(renderer, codec, files)
        return named
    rejected: list[str] = []
    try:
        found: CodecRenderer | None = find("parts", "fitting_renderer")(codec, files, rejected)
    except ConfigError as error:
        rejected.append(str(error))
    else:
        if found is not None:
            log.info("renderer chosen folder=%s renderer=%s", folder, found.caps.source)
            return found
    try:
        chosen = template_renderer(files, codec)
    except RenderError as error:
        raise RenderError(f"{folder}: {'; '.join([f'template: {error}', *rejected])}") from error
    log.info("renderer chosen folder=%s renderer=template rejected=%r", folder, rejected)
    return chosen


def _with_arguments(files: ModelFiles, query: str) -> ModelFiles:
    """Return the files with more arguments of the template. Raises RenderError for one that it has not."""
    given = dict(part.partition("=")[::2] for part in query.split("&") if part)
    words = {*re.findall(r"\w+", files.template or "")}
    if unknown := sorted(name for name in given if words and name not in words):
        raise RenderError(f"model.renderer: the chat template has no argument {unknown[0]!a}")
    with boundary(RenderError, f"model.renderer: {query!a} is not NAME=JSON"):
        values = {name: json.loads(text) for name, text in given.items()}
    own = replace(files.renderer, template_arguments={**files.renderer.template_arguments, **values})
    return replace(files, renderer=own)
