"""mini-swe-agent: chat completions without streaming, one tool (bash), no compaction or sub-agents.

It ends when the model runs its submit command, and gives up after three consecutive replies without a tool
call. Both have exit code 0, so its printed exit status is parsed. Replies without a call are removed from its
history.
"""

from __future__ import annotations

from insitu.agents.base import AgentExit
from insitu.agents.recipe import Recipe, exit_code_rule
from insitu.sandbox.base import ExecResult

GAVE_UP = ("RepeatedFormatError", "LimitsExceeded", "TimeExceeded")


def _rule(result: ExecResult) -> tuple[AgentExit, str]:
    if result.exit_code != 0:
        return exit_code_rule(result)
    status = result.stdout.decode("utf-8", "replace").rpartition("Exit:")[2]
    gave_up = [reason for reason in GAVE_UP if status.split()[:1] == [reason]]
    return ("failed", f"gave up: {gave_up[0]}") if gave_up else ("finished", "")


RECIPE = Recipe(
    name="mini_swe",
    # mcp is required by its version of litellm.
    pip=("mini-swe-agent==2.4.6", "mcp==2.3.0"),
    command=(
        *("mini", "--model", "openai/{model}", "--task={prompt}", "--yolo", "--exit-immediately"),
        *("--cost-limit", "0", "--output", "{home}/run.traj.json"),
    ),
    check=("--help",),
    rule=_rule,
    env={
        "OPENAI_BASE_URL": "{address}/v1",
        "OPENAI_API_BASE": "{address}/v1",
        "OPENAI_API_KEY": "{api_key}",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
)
