"""The OpenAI Agents SDK as the agent, over the Responses API, with one shell tool."""

import os
import subprocess
import sys

import agents


@agents.function_tool
def bash(command: str) -> str:
    """Run a shell command in the work folder."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr)[-8000:] or f"exit code {done.returncode}"


agents.set_tracing_disabled(True)
coder = agents.Agent(name="coder", model=os.environ["OPENAI_MODEL"], tools=[bash])
print(agents.Runner.run_sync(coder, sys.stdin.read(), max_turns=100).final_output)
