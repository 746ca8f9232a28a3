"""Gemini CLI: Google's generateContent, headless by `-p`.

It compacts at a share of the window that it believes its model to have, counted by the server, and cuts only
at a message of the user: a run with one prompt gives it few places. Where it finds none, the gateway's error
for a conversation that is too long ends the run. It does not survive a broken stream.
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
"""What it takes for the window of a model that it does not know; there is no setting."""


def _argv(start: Start) -> Sequence[str]:
    return [NODE_AT, start.program, "--yolo", "--model", start.model, f"--prompt={start.prompt}"]


def _env(start: Start) -> Mapping[str, str]:
    return {
        "GOOGLE_GEMINI_BASE_URL": start.address,
        "GEMINI_API_KEY": start.secret,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        # Else it starts itself anew with half of the machine's memory as its heap.
        "GEMINI_CLI_NO_RELAUNCH": "true",
        "NO_COLOR": "1",
    }


def _files(start: Start) -> Mapping[str, bytes]:
    settings = {
        # Without it the program stops with exit code 41.
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
