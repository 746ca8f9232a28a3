"""Replacement of secrets, home paths and the host name in what leaves the machine."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from insitu.config import Config
from insitu.config.base import holds_paths, is_extension, is_path
from insitu.errors import ConfigError
from insitu.storage.logs import SECRET

_KEYS = re.compile(r"\b(?:sk-|gh[opsu]_|github_pat_|hf_|xox[abp]-|AKIA)[A-Za-z0-9_-]{16,}")
_LOGINS = re.compile(r"(?<=://)[^/\s@\"']+:[^/\s@\"']+(?=@)")
"""User and password of a URL."""
_HOMES = re.compile(r"/(?:home|Users)/[^/\s\"'`:;,<>()\\]+")
_SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables that hold secrets."""
_SECRET_CHARS = 8
"""Shorter values of such variables are common words."""


class Redaction:
    """Replacement of secrets, home paths, the host name and chosen patterns in text."""

    def __init__(self, chosen: Sequence[str] = ()) -> None:
        """Take regular expressions; raise ConfigError for one that is not valid."""
        self._patterns = [(SECRET, "***"), (_KEYS, "***"), (_LOGINS, "***"), (_HOMES, "~")]
        held = {value for name, value in os.environ.items() if _SECRET_NAMES.search(name)}
        for value in sorted(held, key=len, reverse=True):
            if len(value) >= _SECRET_CHARS and not value.startswith("/"):
                self._patterns.insert(0, (re.compile(re.escape(value)), "***"))
        home, host = str(Path.home()), socket.gethostname()
        if home != "/":
            self._patterns.append((re.compile(re.escape(home) + r"(?![\w.-])"), "~"))
        if len(host) > 2 and host != "localhost":
            self._patterns.append((re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])"), "HOST"))
        for text in chosen:
            try:
                self._patterns.append((re.compile(text), "***"))
            except re.error as error:
                raise ConfigError(f"--redact {text} is not a regular expression: {error}") from error

    def text(self, text: str) -> str:
        for pattern, instead in self._patterns:
            text = pattern.sub(instead, text)
        return text

    def hits(self, text: str) -> bool:
        """Return whether something in a text would be replaced."""
        return any(pattern.search(text) for pattern, _ in self._patterns)

    def has_secret(self, text: str) -> bool:
        """Return whether a text holds what looks like a secret, or a chosen pattern."""
        return any(instead == "***" and pattern.search(text) for pattern, instead in self._patterns)

    def config(self, config: Config) -> Config:
        """Return a configuration for others: of a path only the last name, and texts without secrets.

        It is as valid as before, and `model.path=FOLDER` makes it complete on another machine.
        """
        return config.mapped(self._shared)

    def _shared(self, key: FieldInfo, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._shared(key, item) for item in value)
        if isinstance(value, str) and (holds_paths(key) or ".py:" in value) and is_path(value):
            return Path(value).name
        # Names of choices must stay as they are.
        return value if is_extension(key) or "Literal" in str(key.annotation) else self.value(value)

    def value(self, value: Any) -> Any:
        """Return JSON with every text and key replaced."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list | tuple) else value
