"""Claude Code: a native program that speaks Anthropic Messages; headless by `-p`, prompt on stdin."""

from __future__ import annotations

import orjson

from insitu.agents.base import AgentExit
from insitu.agents.recipe import Recipe, exit_code_rule
from insitu.sandbox.base import ExecResult


def _rule(result: ExecResult) -> tuple[AgentExit, str]:
    # The last line of stdout is the result; stderr is mostly unrelated.
    last = result.stdout.rstrip().rpartition(b"\n")[2]
    try:
        report = orjson.loads(last)
    except orjson.JSONDecodeError:
        report = None
    if not isinstance(report, dict) or report.get("type") != "result":
        return exit_code_rule(result)
    if result.exit_code == 0 and report.get("is_error") is False:
        return "finished", ""
    lines = str(report.get("result") or report.get("subtype") or "").strip().splitlines() or [""]
    return "failed", f"exit code {result.exit_code}: {lines[0][:300]}"


RECIPE = Recipe(
    name="claude_code",
    protocol="anthropic",
    npm=("@anthropic-ai/claude-code@2.1.332",),
    # For an older Node npm silently picks 2.1.197.
    node=(22, 0),
    command=(
        *("node_modules/@anthropic-ai/claude-code-linux-*/claude", "-p", "--model", "{model}"),
        *("--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"),
    ),
    check=("--version",),
    rule=_rule,
    env={
        "ANTHROPIC_BASE_URL": "{address}",
        "ANTHROPIC_AUTH_TOKEN": "{api_key}",
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
        "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{call_tokens}",
        # Context window of a model unknown to Claude Code, and the percentage at which it compacts.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{context_tokens}",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context_tokens}",
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "{compact_percent}",
        # Otherwise the system prompt begins with a line that changes between calls.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    },
)
