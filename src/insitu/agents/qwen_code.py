"""Qwen Code: chat completions, headless by `--prompt`; its sub-agents run in the background.

It compacts when the prompt length reported by the server plus pending text exceeds a percentage of the
configured window; the summary is requested with a separate system prompt and without tools.
"""

from __future__ import annotations

import json

from insitu.agents.recipe import Recipe, Start

RESERVE_TOKENS = 33_000
"""Part of the window that it reserves for a summary, far more than one call of the policy may sample."""


def _settings(start: Start) -> str:
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
    return json.dumps(settings)


RECIPE = Recipe(
    name="qwen_code",
    npm=("@qwen-code/qwen-code@0.24.4",),
    node=(22, 0),
    # From stdin the prompt would get two additional newlines.
    command=("qwen", "--auth-type", "openai", "--yolo", "--prompt={prompt}"),
    check=("--version",),
    env={
        "OPENAI_BASE_URL": "{address}/v1",
        "OPENAI_API_KEY": "{api_key}",
        "OPENAI_MODEL": "{model}",
        # Otherwise it restarts itself with a heap larger than its memory limit.
        "QWEN_CODE_NO_RELAUNCH": "1",
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        "QWEN_CODE_DISABLE_PRECONNECT": "1",
    },
    config_files={".qwen/settings.json": _settings},
    process_memory_bytes=2 << 30,
)
