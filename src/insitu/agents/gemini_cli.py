"""Gemini CLI: Google's generateContent, headless by `-p`.

It compacts at a percentage of the context window that it assumes for its model, and cuts only at user
messages: a run with one prompt has few. If there is none, the gateway's context-length error ends the run. It
does not recover from a broken stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from insitu.agents.install import Package
from insitu.agents.recipe import HOME, NODE_AT, Recipe, Start, no_stdin

PACKAGE = Package(
    registry="npm",
    name="@google/gemini-cli",
    version="0.61.0",
    label="gemini-cli",
    program="node_modules/@google/gemini-cli/bundle/gemini.js",
    node=(20, 0),
)
WINDOW_TOKENS = 1 << 20
"""Context window that it assumes for unknown models; there is no setting."""


def _argv(start: Start) -> Sequence[str]:
    return [NODE_AT, start.program, "--yolo", "--model", start.model, f"--prompt={start.prompt}"]


def _env(start: Start) -> Mapping[str, str]:
    return {
        "GOOGLE_GEMINI_BASE_URL": start.address,
        "GEMINI_API_KEY": start.secret,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        # Otherwise it restarts itself with half of the machine's memory as its heap.
        "GEMINI_CLI_NO_RELAUNCH": "true",
        "NO_COLOR": "1",
    }


def _files(start: Start) -> Mapping[str, bytes]:
    settings = {
        # Without this setting the program exits with code 41.
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "model": {"compressionThreshold": start.compact_tokens / WINDOW_TOKENS},
    }
    return {f"{HOME}/.gemini/settings.json": orjson.dumps(settings)}


RECIPE = Recipe(
    name="gemini_cli",
    package=PACKAGE,
    argv=_argv,
    env=_env,
    files=_files,
    stdin=no_stdin,
    node=True,
    memory_bytes=2 << 30,
    dialect="gemini",
)
