"""Compare a server with the run's model folder, before anything samples from it.

A server may have more ids than the folder's tokenizer (padding of its embeddings), not other ones: texts of
sample ids are compared. A server without the route, or without a tokenizer, is left to the probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from insitu.engines.http import EngineHttp, HttpOptions, NotOffered, open_http
from insitu.errors import EngineError, EngineUnavailable

_SAMPLES = 256
"""Ordinary ids whose texts are compared."""


class VocabularySample:
    """Ids of a tokenizer, all over its vocabulary, and their text."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's tokenizer.json. Control tokens are left out: some servers do not print them."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        size, added = tokenizer.get_vocab_size(), tokenizer.get_added_tokens_decoder()
        ids = {*range(0, size, max(1, size // _SAMPLES)), size - 1, *added}
        self.ids = sorted(i for i in ids if not (i in added and added[i].special))
        self._text = _letters(tokenizer.decode(self.ids, skip_special_tokens=False))

    def is_text(self, answer: Mapping[str, Any]) -> bool:
        """Return whether a server's answer to /detokenize is the text of the ids.

        Spaces are not compared: transformers may remove some.
        """
        text = answer.get("prompt", answer.get("text"))
        return isinstance(text, str) and _letters(text) == self._text


def _letters(text: str) -> str:
    return "".join(text.split())


async def check_served(options: HttpOptions, kind: str, folder: Path, *, adapters: bool) -> None:
    """Raise EngineError for a vLLM or SGLang server of another vocabulary, or without adapters if needed."""
    async with open_http(options, f"{kind} at {options.url}") as http:
        if (folder / "tokenizer.json").exists():
            await _check_vocabulary(http, folder)
        if adapters:
            await _check_adapters(http)


async def _check_vocabulary(http: EngineHttp, folder: Path) -> None:
    sample = VocabularySample(folder)
    try:
        found = sample.is_text(await http.post("/detokenize", {"tokens": sample.ids}))
    except EngineUnavailable:
        raise
    except NotOffered:
        return
    except EngineError as error:
        # an id that the server does not have; without a tokenizer it fails with any
        try:
            await http.post("/detokenize", {"tokens": sample.ids[:1]})
        except EngineUnavailable:
            raise
        except EngineError:
            return
        found, why = False, f" ({error})"
    else:
        why = ""
    if not found:
        raise EngineError(
            f"{http.name} serves another vocabulary than the tokenizer in {folder}{why}: start it on that"
            " model, or set model.path to the model that it serves"
        )


async def _check_adapters(http: EngineHttp) -> None:
    """Raise EngineError if the server has no route for adapters; an empty request changes nothing."""
    try:
        await http.post("/v1/load_lora_adapter", {})
    except NotOffered as error:
        raise EngineError(no_adapters(http.name)) from error
    except EngineUnavailable:
        raise
    except EngineError:
        return  # it has the route and refuses the request


def no_adapters(name: str) -> str:
    """Return what to do about a server that takes no adapters."""
    return (
        f"{name} takes no adapters: start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or"
        ' set engine.publish_lora = "merged"'
    )
