"""Codex: a native program that speaks OpenAI Responses; headless by `exec`, prompt on stdin."""

from __future__ import annotations

from insitu.agents.recipe import Recipe

RECIPE = Recipe(
    name="codex",
    protocol="responses",
    npm=("@openai/codex@0.171.0",),
    command=(
        *("node_modules/@openai/codex-linux-*/vendor/*/bin/codex", "exec", "--skip-git-repo-check"),
        *("--dangerously-bypass-approvals-and-sandbox", "--json", "-"),
    ),
    check=("--version",),
    env={"INSITU_API_KEY": "{api_key}", "CODEX_HOME": "{home}/.codex"},
    config_files={
        ".codex/config.toml": """\
model = "{model}"
model_provider = "insitu"
model_context_window = {context_tokens}
model_auto_compact_token_limit = {compact_tokens}
check_for_update_on_startup = false
[model_providers.insitu]
name = "insitu"
base_url = "{address}/v1"
env_key = "INSITU_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
    },
)
