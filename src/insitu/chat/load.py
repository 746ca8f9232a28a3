"""Choose the ChatRenderer of a model folder.

Rules of the `renderers` package (insitu-bridges) are used where they write the same text as the folder's own
chat template, else that template itself by the delta rule. The choice depends on ids and text, never on a
model's name: fine-tunes often carry another template.
"""

from __future__ import annotations

import logging
from pathlib import Path

from insitu.chat.codec import Codec
from insitu.chat.model_files import read_folder
from insitu.chat.template import template_renderer
from insitu.chat.validation import CodecRenderer
from insitu.errors import ConfigError, RenderError
from insitu.registry import find

log = logging.getLogger("insitu.chat")


def load_renderer(folder: Path, renderer: str = "auto") -> CodecRenderer:
    """Load and check the renderer of a model folder.

    `renderer`: auto, template, hermes (the template of a folder that `config.model_folder` made), or a name
    of the `renderers` package. Raises RenderError if none passes its checks.
    """
    files = read_folder(folder)
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
