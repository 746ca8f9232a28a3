"""Parts of messages that are no text, for a model that reads only text; pure.

Each is read as one line of text: a refusal would come back for every later request with the same history.
A file that is text is read as its text. Nothing is fetched.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Iterable

from insitu.gateway.dialects.base import string

_LINE = "[{} left out: this model reads text]"
_WRITTEN = re.compile(r"\[(image|audio|video|file|document) left out: this model reads text\]")
_KIND = re.compile(r"image|screenshot|audio|video|file|document")


def medium(name: object) -> str:
    """Return what a part with this type or MIME type holds: image, audio, video, file or document.

    Empty for a part that is none of these.
    """
    found = _KIND.search(name) if isinstance(name, str) else None
    return "" if found is None else found[0].replace("screenshot", "image")


def left_out(kind: str) -> str:
    """Return the line in the place of a part."""
    return _LINE.format(kind)


def in_place_of(texts: Iterable[str]) -> list[str]:
    """Return the medium of each such line in `texts`."""
    return [kind for text in texts if "left out: this model" in text for kind in _WRITTEN.findall(text)]


def from_data(kind: str, mime: object, data: object, param: str) -> str:
    """Return the text in base64 data of a textual MIME type, else the line. Raises WireError."""
    if data and isinstance(mime, str) and (mime.startswith("text/") or mime == "application/json"):
        with contextlib.suppress(ValueError):
            return base64.b64decode(string(data, param), validate=True).decode()
    return left_out(kind)


def from_url(kind: str, url: object, param: str) -> str:
    """Return the text in a `data:` URL of a textual MIME type, else the line. Raises WireError."""
    head, _, data = string(url, param).partition(",")
    mime, *how = head.removeprefix("data:").split(";")
    return from_data(kind, mime if "base64" in how else None, data, param)
