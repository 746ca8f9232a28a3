"""OpenCode: a native program that speaks chat completions through its OpenAI-compatible provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from insitu.agents.install import Package
from insitu.agents.recipe import HOME, Recipe, Start

PACKAGE = Package(
    registry="npm",
    name="opencode-ai",
    version="1.18.33",
    label="opencode",
    # On x64 the last match is the baseline build, which needs no AVX2.
    program="node_modules/opencode-linux-*/bin/opencode",
)
CONFIG = f"{HOME}/.config/opencode/opencode.json"


def _argv(start: Start) -> Sequence[str]:
    # Without a title it would request one from the model.
    return [start.program, "run", "--model", f"insitu/{start.model}", "--title", "task"]


def _env(start: Start) -> Mapping[str, str]:
    return {
        "INSITU_API_KEY": start.secret,
        "OPENCODE_CONFIG": CONFIG,
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    }


def _files(start: Start) -> Mapping[str, bytes]:
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
    return {CONFIG: orjson.dumps(config)}


RECIPE = Recipe(
    name="opencode",
    package=PACKAGE,
    argv=_argv,
    env=_env,
    files=_files,
    # With 1 GiB it runs out of memory at its first command; with 2 GiB it mostly collects garbage.
    memory_bytes=4 << 30,
)
