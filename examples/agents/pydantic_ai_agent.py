"""pydantic-ai as the agent, with one shell tool."""

import os
import subprocess
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]))


@agent.tool_plain
def bash(command: str) -> str:
    """Run a shell command in the work folder."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr)[-8000:] or f"exit code {done.returncode}"


print(agent.run_sync(sys.stdin.read()).output)
