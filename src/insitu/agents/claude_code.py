"""Claude Code: a native program that speaks Anthropic Messages; headless by `-p`, prompt on stdin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from insitu.agents.base import AgentExit
from insitu.agents.install import Package
from insitu.agents.process import exit_code_rule
from insitu.agents.recipe import Recipe, Start
from insitu.sandbox.base import ExecResult

PACKAGE = Package(
    registry="npm",
    name="@anthropic-ai/claude-code",
    version="2.1.329",
    label="claude-code",
    program="node_modules/@anthropic-ai/claude-code-linux-*/claude",
    # For an older Node npm silently picks 2.1.197.
    node=(22, 0),
)


def _argv(start: Start) -> Sequence[str]:
    flags = ["--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"]
    return [start.program, "-p", "--model", start.model, *flags]


def _env(start: Start) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": start.address,
        "ANTHROPIC_AUTH_TOKEN": start.secret,
        "ANTHROPIC_SMALL_FAST_MODEL": start.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": start.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": start.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": start.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": start.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(start.max_call_tokens),
        # Context window of a model unknown to Claude Code, and the percentage at which it compacts.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(start.context_tokens),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(start.context_tokens),
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": str(100 * start.compact_tokens // start.context_tokens),
        # Otherwise the system prompt begins with a line that changes between calls.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }


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


RECIPE = Recipe(name="claude_code", package=PACKAGE, argv=_argv, env=_env, rule=_rule, dialect="anthropic")
