"""Codex: a native program that speaks OpenAI Responses; headless by `exec`, prompt on stdin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from insitu.agents.install import Package
from insitu.agents.recipe import HOME, Recipe, Start

PACKAGE = Package(
    registry="npm",
    name="@openai/codex",
    version="0.169.0",
    label="codex",
    program="node_modules/@openai/codex-linux-*/vendor/*/bin/codex",
)
CONFIG = f"{HOME}/.codex/config.toml"


def _argv(start: Start) -> Sequence[str]:
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    return [start.program, "exec", *flags, "-"]


def _env(start: Start) -> Mapping[str, str]:
    return {"INSITU_API_KEY": start.secret, "CODEX_HOME": f"{HOME}/.codex"}


def _files(start: Start) -> Mapping[str, bytes]:
    lines = [
        f"model = {json.dumps(start.model)}",
        'model_provider = "insitu"',
        f"model_context_window = {start.context_tokens}",
        f"model_auto_compact_token_limit = {start.compact_tokens}",
        "check_for_update_on_startup = false",
        "[model_providers.insitu]",
        'name = "insitu"',
        f"base_url = {json.dumps(start.address + '/v1')}",
        'env_key = "INSITU_API_KEY"',
        'wire_api = "responses"',
        "[analytics]",
        "enabled = false",
    ]
    return {CONFIG: "\n".join([*lines, ""]).encode()}


RECIPE = Recipe(name="codex", package=PACKAGE, argv=_argv, env=_env, files=_files, dialect="responses")
