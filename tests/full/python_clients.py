"""The OpenAI Agents SDK: one loop of tool calls. Prints its last words as JSON.

Run by test_python_clients.py in a process of its own: CLIENT (chat or handoff), ADDRESS, KEY.
"""

from __future__ import annotations

import json
import os

from openai import AsyncOpenAI

import agents


@agents.function_tool
def read(path: str) -> str:
    """Read a file."""
    return f"content of {path}"


handoff = os.environ["CLIENT"] == "handoff"
client = AsyncOpenAI(base_url=os.environ["ADDRESS"], api_key=os.environ["KEY"], max_retries=0)
agents.set_default_openai_client(client, False)
agents.set_default_openai_api("responses" if handoff else "chat_completions")
agents.set_tracing_disabled(True)
writer = agents.Agent(name="writer", instructions="Say what was found.", model="m")
reader = agents.Agent(
    name="reader",
    instructions="Read the files.",
    model="m",
    tools=[read],
    handoffs=[writer] if handoff else [],
)
print(json.dumps(agents.Runner.run_sync(reader, "What is in a and b?").final_output))
