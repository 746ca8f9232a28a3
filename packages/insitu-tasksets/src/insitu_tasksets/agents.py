"""Agents from npm and PyPI by name, all by chat completions; each passed `insitu conformance` at its pin.

Their install scripts are not run. None has sub-agents or compacts when it is driven like this.
"""

from __future__ import annotations

from insitu.agents.recipe import Recipe

OPENAI = {"OPENAI_BASE_URL": "{address}/v1", "OPENAI_API_BASE": "{address}/v1", "OPENAI_API_KEY": "{api_key}"}

KIMI_CODE = Recipe(
    name="kimi_code",
    npm=("@moonshot-ai/kimi-code@2.1.0",),
    command=("kimi", "--prompt", "{prompt}"),
    env={"KIMI_API_KEY": "{api_key}"},
    config_files={
        ".kimi-code/config.toml": """\
default_model = "policy"
default_permission_mode = "auto"
telemetry = false

[providers.insitu]
type = "openai"
base_url = "{address}/v1"
api_key = "{api_key}"

[models.policy]
provider = "insitu"
model = "{model}"
max_context_size = {context_tokens}
max_output_size = {call_tokens}
capabilities = ["tool_use"]
"""
    },
)

CONTINUE_CN = Recipe(
    name="continue_cn",
    npm=("@continuedev/cli@1.5.47",),
    command=("cn", "--print", "--auto", "--config", "{home}/.continue/insitu.yaml", "{prompt}"),
    env={**OPENAI, "CONTINUE_TELEMETRY_ENABLED": "0"},
    config_files={
        ".continue/insitu.yaml": """\
name: insitu
version: 1.0.0
schema: v1
models:
  - name: policy
    provider: openai
    model: {model}
    apiBase: {address}/v1
    apiKey: {api_key}
    roles: [chat]
    capabilities: [tool_use]
    contextLength: {context_tokens}
    defaultCompletionOptions: {contextLength: {context_tokens}, maxTokens: {call_tokens}}
"""
    },
)

GROK_CLI = Recipe(
    name="grok_cli",
    npm=("@vibe-kit/grok-cli@0.0.34",),
    command=("grok", "--model", "{model}", "--prompt", "{prompt}"),
    env={"GROK_BASE_URL": "{address}/v1", "GROK_API_KEY": "{api_key}"},
)

CLINE = Recipe(
    name="cline",
    npm=("cline@3.0.65",),
    command=(
        *("node_modules/@cline/cli-linux-*/bin/cline", "--provider", "openai-compatible"),
        *("--model", "{model}", "--auto-approve", "true", "{prompt}"),
    ),
    env=OPENAI,
    config_files={
        ".cline/data/settings/providers.json": """\
{"version": 1, "lastUsedProvider": "openai-compatible", "modes": {}, "providers": {"openai-compatible": {
  "settings": {"provider": "openai-compatible", "apiKey": "{api_key}", "model": "{model}",
               "baseUrl": "{address}/v1"},
  "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}}}
"""
    },
)

GPTME = Recipe(
    name="gptme",
    pip=("gptme==0.35.1",),
    # With all of its tools it ends a turn of several calls after the first.
    command=(
        *("gptme", "--non-interactive", "--no-confirm", "--no-stream", "--model", "local/{model}"),
        *("--tool-format", "tool", "--tools", "shell", "{prompt}"),
    ),
    env=OPENAI,
)

AIDER = Recipe(
    name="aider",
    pip=("aider-chat==0.86.2",),
    command=(
        *(
            "aider",
            "--model",
            "openai/{model}",
            "--message-file",
            "{prompt_file}",
            "--yes-always",
            "--no-git",
        ),
        *("--no-check-update", "--no-analytics", "--no-show-model-warnings"),
    ),
    env={**OPENAI, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
)
