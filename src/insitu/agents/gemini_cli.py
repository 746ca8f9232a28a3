"""Gemini CLI: Google's generateContent, headless by `-p`.

It compacts at a percentage of the context window that it assumes for its model, and cuts only at user
messages: a run with one prompt has few. If there is none, the gateway's context-length error ends the run. It
does not recover from a broken stream.
"""

from __future__ import annotations

import json

from insitu.agents.recipe import Recipe, Start

WINDOW_TOKENS = 1 << 20
"""Context window that it assumes for unknown models; there is no setting."""


def _settings(start: Start) -> str:
    settings = {
        # Without this setting the program exits with code 41.
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "model": {"compressionThreshold": start.compact_tokens / WINDOW_TOKENS},
    }
    return json.dumps(settings)


RECIPE = Recipe(
    name="gemini_cli",
    protocol="gemini",
    npm=("@google/gemini-cli@0.61.0",),
    node=(20, 0),
    command=("gemini", "--yolo", "--model", "{model}", "--prompt={prompt}"),
    check=("--version",),
    env={
        "GOOGLE_GEMINI_BASE_URL": "{address}",
        "GEMINI_API_KEY": "{api_key}",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        # Otherwise it restarts itself with half of the machine's memory as its heap.
        "GEMINI_CLI_NO_RELAUNCH": "true",
        "NO_COLOR": "1",
    },
    config_files={".gemini/settings.json": _settings},
    process_memory_bytes=2 << 30,
)
