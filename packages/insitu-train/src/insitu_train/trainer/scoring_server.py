"""A vLLM server that scores prompts for a reference policy: its calls, and whether it fits a model.

Preflight asks it before anything starts, the learner for each step. Never imports torch.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.backoff import backoff_s
from insitu.engines.http import checked_url
from insitu.engines.served_model import VocabularySample
from insitu.errors import ConfigError, TrainError, boundary

ATTEMPTS = 5
"""Calls of a server that is busy or away; some ten seconds."""
_START_S = 30.0
"""Timeout of the calls at the start."""


class ScoringServer:
    """A server of one model."""

    def __init__(self, url: str, key: str, model: Path, timeout_s: float, attempts: int = ATTEMPTS) -> None:
        """Connect. key: names the address in messages. model: folder with the trained model's tokenizer.

        timeout_s: of one call with its retries. Raises ConfigError when the server cannot be reached or has
        another vocabulary.
        """
        self._url, self._attempts, self._timeout_s = checked_url(url, key), attempts, min(timeout_s, _START_S)
        self.name = f"the teacher {self._url} ({key})"
        try:
            card = self.call("/v1/models")["data"][0]
            self.model, self.max_positions = str(card["id"]), int(card["max_model_len"]) - 1
            sample = VocabularySample(model)
            fits = sample.is_text(self.call("/detokenize", {"model": self.model, "tokens": sample.ids}))
        except (TrainError, KeyError, IndexError, TypeError) as error:
            why = str(error).removeprefix(f"{self.name}: ")
            raise ConfigError(f"{key}: {self._url} is not a vLLM server that scores: {why}") from error
        if not fits:
            raise ConfigError(f"{key}: {self._url} has another vocabulary than model.path")
        self._timeout_s = timeout_s

    def call(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of a reply, retried while the server is busy or away. Raises TrainError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + route, data, {"Content-Type": "application/json"})
        until = time.monotonic() + self._timeout_s
        for failures in range(1, self._attempts):
            try:
                return self._once(request, until)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in (429, 500, 502, 503):
                        said = f"{self.name}: {route} answered {error.code}: {_detail(error)}"
                        raise TrainError(said) from error
            except OSError:
                pass  # not reachable, or cut off
            time.sleep(max(0.0, min(backoff_s(failures, 1.0), until - time.monotonic())))
        with boundary(TrainError, f"{self.name}: {route}"):
            return self._once(request, until)

    def _once(self, request: urllib.request.Request, until: float) -> Any:
        # proxies of the environment are for other hosts
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=max(0.1, until - time.monotonic())) as reply:
            return json.load(reply)


def _detail(error: urllib.error.HTTPError) -> str:
    return error.read(300).decode("utf-8", "replace").strip()
