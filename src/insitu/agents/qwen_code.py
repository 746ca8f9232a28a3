"""Qwen Code: chat completions, headless by `--prompt`; its sub-agents run in the background.

It compacts when the prompt length reported by the server plus pending text exceeds a percentage of the
configured window; the summary is requested with a separate system prompt and without tools.
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
"""Part of the window that it reserves for a summary, far more than one call of the policy may sample."""


def _argv(start: Start) -> Sequence[str]:
    # From stdin the prompt would get two additional newlines.
    return [NODE_AT, start.program, "--auth-type", "openai", "--yolo", f"--prompt={start.prompt}"]


def _env(start: Start) -> Mapping[str, str]:
    return {
        "OPENAI_BASE_URL": f"{start.address}/v1",
        "OPENAI_API_KEY": start.secret,
        "OPENAI_MODEL": start.model,
        # Otherwise it restarts itself with a heap larger than its memory limit.
        "QWEN_CODE_NO_RELAUNCH": "1",
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        "QWEN_CODE_DISABLE_PRECONNECT": "1",
    }


def _files(start: Start) -> Mapping[str, bytes]:
    # It compacts at min(percentage of the window, window - reserve).
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
        # Its npm package makes ripgrep executable in an install script, and these are not run.
        "tools": {"useRipgrep": False},
        # Disabled: background agents that write notes for later sessions.
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
