"""Qwen Code: chat completions, headless by `--prompt`; its sub-agents run in the background.

It compacts when the prompt that the server counted, plus what is pending, passes a share of the window it was
told; the summary is asked for under a system prompt of its own and without tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from insitu.agents.install import Package
from insitu.agents.recipe import HOME, NODE_AT, Recipe, Start, no_stdin

PACKAGE = Package(
    registry="npm",
    name="@qwen-code/qwen-code",
    version="0.24.4",
    label="qwen-code",
    program="node_modules/@qwen-code/qwen-code/cli.js",
    node=(22, 0),
)

RESERVE_TOKENS = 33_000
"""What it keeps free of its window for a summary, which is far more than the policy may say at once."""


def _argv(start: Start) -> Sequence[str]:
    # Read from stdin the prompt would get two more newlines.
    return [NODE_AT, start.program, "--auth-type", "openai", "--yolo", f"--prompt={start.prompt}"]


def _env(start: Start) -> Mapping[str, str]:
    return {
        "OPENAI_BASE_URL": f"{start.address}/v1",
        "OPENAI_API_KEY": start.secret,
        "OPENAI_MODEL": start.model,
        # Else it starts itself anew with a larger heap than its limit allows.
        "QWEN_CODE_NO_RELAUNCH": "1",
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        "QWEN_CODE_DISABLE_PRECONNECT": "1",
    }


def _files(start: Start) -> Mapping[str, bytes]:
    # It compacts at the smaller of its share of the window and the window less its reserve.
    window = start.compact_tokens + RESERVE_TOKENS
    generation = {
        "contextWindowSize": window,
        "samplingParams": {"max_tokens": start.max_call_tokens},
        "maxRetries": 1,
    }
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "model": {"generationConfig": generation},
        "context": {"autoCompactThreshold": start.compact_tokens / window},
        # Its npm package marks the search program as executable only in a script, and no script is run.
        "tools": {"useRipgrep": False},
        # Notes for a later session, of which there is none, written by agents of their own.
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
    }
    return {f"{HOME}/.qwen/settings.json": orjson.dumps(settings)}


RECIPE = Recipe(
    name="qwen_code",
    package=PACKAGE,
    argv=_argv,
    env=_env,
    files=_files,
    stdin=no_stdin,
    node=True,
    memory_bytes=2 << 30,
)
