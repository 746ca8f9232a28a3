"""LangGraph as the agent: its prebuilt loop with one shell tool."""

import os
import subprocess
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def bash(command: str) -> str:
    """Run a shell command in the work folder."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr)[-8000:] or f"exit code {done.returncode}"


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"], max_retries=0)
agent = create_react_agent(model, [bash])
result = agent.invoke({"messages": [("user", sys.stdin.read())]}, {"recursion_limit": 100})
print(result["messages"][-1].content)
