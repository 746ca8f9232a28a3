"""Search in what agents said and were answered: a bounded scan of the stored tokens, newest first.

Nothing is indexed: the run directory is read only, and a commit of the run costs nothing more. Tokens are
joined as bytes and not parsed, which is 20 times as fast as a transcript.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from insitu.storage import queries as sql
from insitu_train.words import Words
from insitu_view.web.runs import RunHandle

SEARCH_S = 1.0
"""CPU time after which a part of a search ends."""
TURNS = 256
"""Turns read at once."""
MAX_MATCHES = 50
SHOWN_BYTES = 120
"""Bytes of text shown before and after a match."""


def search_page(run: RunHandle, words: Words | None, problem: str, text: str, before: int) -> dict[str, Any]:
    """Return turns whose new tokens hold `text`; letters A to Z match either case.

    `before`: row of a turn, only older ones are searched. `next` continues where the time was over.
    """
    found: dict[str, Any] = {"text": text, "matches": [], "searched": 0, "next": None, "problem": problem}
    needle = text.encode().lower()
    if words is None or not needle:
        return found
    until_s = time.thread_time() + SEARCH_S
    with run.reader() as reader:
        while time.thread_time() < until_s and len(found["matches"]) < MAX_MATCHES:
            turns = reader.all(sql.TURNS_BEFORE, before=before, count=TURNS)
            for turn in turns:
                found["searched"] += 1
                before = turn["row"]
                if match := _match(words, turn, needle):
                    found["matches"].append({"id": turn["id"], "turn": turn["turn"]} | match)
                    if len(found["matches"]) == MAX_MATCHES:
                        break
            if len(turns) < TURNS and (not turns or before == turns[-1]["row"]):
                return found
    return found | {"next": before}


def _match(words: Words, turn: dict[str, Any], needle: bytes) -> dict[str, Any] | None:
    """Return where the text is, and what stands around it; a reply before what it answers."""
    for name, column in (("reply", "ids"), ("prompt", "context_ids")):
        text = words.bytes(np.frombuffer(turn[column], dtype="<i4"))
        at = text.lower().find(needle)
        if at >= 0:
            stop = at + len(needle)
            cut = text[max(0, at - SHOWN_BYTES) : at], text[at:stop], text[stop : stop + SHOWN_BYTES]
            before, match, after = (part.decode("utf-8", "replace") for part in cut)
            return {"where": name, "before": before, "match": match, "after": after}
    return None
