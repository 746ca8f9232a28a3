"""mini-swe-agent: chat completions without streaming, one tool (bash), no compaction or sub-agents.

It ends when the model runs its submit command, and gives up after three consecutive replies without a tool
call. Both have exit code 0, so its printed exit status is parsed. Replies without a call are removed from its
history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from insitu.agents.base import AgentExit
from insitu.agents.install import Package
from insitu.agents.process import exit_code_rule
from insitu.agents.recipe import HOME, Recipe, Start, no_stdin
from insitu.sandbox.base import ExecResult

PACKAGE = Package(
    registry="pypi",
    name="mini-swe-agent",
    version="2.4.6",
    label="mini-swe-agent",
    program="site/minisweagent/run/mini.py",
    # Required by its version of litellm.
    pins=("mcp==2.3.0",),
)
# Not PYTHONPATH: that would apply to every program that the agent runs.
LAUNCH = "import sys; sys.path.append(sys.argv.pop(1)); from minisweagent.run.mini import app; app()"
GAVE_UP = ("RepeatedFormatError", "LimitsExceeded", "TimeExceeded")


def _argv(start: Start) -> Sequence[str]:
    site = start.program.removesuffix("/minisweagent/run/mini.py")
    flags = ["--yolo", "--exit-immediately", "--cost-limit", "0", "--output", f"{HOME}/run.traj.json"]
    inputs = ["--model", f"openai/{start.model}", f"--task={start.prompt}"]
    return ["python3", "-I", "-c", LAUNCH, site, *inputs, *flags]


def _env(start: Start) -> Mapping[str, str]:
    return {
        "OPENAI_BASE_URL": f"{start.address}/v1",
        "OPENAI_API_BASE": f"{start.address}/v1",
        "OPENAI_API_KEY": start.secret,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _version(program: str) -> Sequence[str]:
    site = program.removesuffix("/minisweagent/run/mini.py")
    return ["python3", "-I", "-c", LAUNCH.replace("; app()", ""), site]


def _rule(result: ExecResult) -> tuple[AgentExit, str]:
    if result.exit_code != 0:
        return exit_code_rule(result)
    status = result.stdout.decode("utf-8", "replace").rpartition("Exit:")[2]
    gave_up = [reason for reason in GAVE_UP if status.split()[:1] == [reason]]
    return ("failed", f"gave up: {gave_up[0]}") if gave_up else ("finished", "")


RECIPE = Recipe(
    name="mini_swe", package=PACKAGE, argv=_argv, env=_env, stdin=no_stdin, rule=_rule, version=_version
)
