"""OpenCode: a native program that speaks chat completions through its OpenAI-compatible provider."""

from __future__ import annotations

import json

from insitu.agents.recipe import Recipe, Start

CONFIG = ".config/opencode/opencode.json"


def _config(start: Start) -> str:
    model = {
        "name": start.model,
        "tool_call": True,
        # `reserved` below is subtracted from `input`.
        "limit": {
            "context": start.context_tokens,
            "input": start.context_tokens,
            "output": start.max_call_tokens,
        },
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "insitu",
        "options": {"baseURL": f"{start.address}/v1", "apiKey": "{env:INSITU_API_KEY}"},
        "models": {start.model: model},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"insitu": provider},
        "permission": {"*": "allow"},
        "compaction": {"reserved": start.context_tokens - start.compact_tokens},
    }
    return json.dumps(config)


RECIPE = Recipe(
    name="opencode",
    npm=("opencode-ai@1.18.33",),
    # Without a title it would request one from the model. On x64 the last match is the baseline build, which
    # needs no AVX2.
    command=(
        *("node_modules/opencode-linux-*/bin/opencode", "run", "--model", "insitu/{model}"),
        *("--title", "task"),
    ),
    check=("--version",),
    env={
        "INSITU_API_KEY": "{api_key}",
        "OPENCODE_CONFIG": f"{{home}}/{CONFIG}",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    },
    config_files={CONFIG: _config},
    # With 1 GiB it runs out of memory at its first command; with 2 GiB it mostly collects garbage.
    process_memory_bytes=4 << 30,
)
