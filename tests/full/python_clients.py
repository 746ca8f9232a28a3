"""Agent libraries of Python, unmodified: one loop of tool calls each. Prints its last words as JSON.

Run by test_python_clients.py in a process of its own: CLIENT, ADDRESS, KEY.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

ADDRESS, KEY = os.environ["ADDRESS"], os.environ["KEY"]
ASK = "What is in a and b?"


def read(path: str) -> str:
    """Read a file."""
    return f"content of {path}"


def langgraph() -> Any:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="m", base_url=ADDRESS, api_key=KEY, max_retries=0)
    agent = create_react_agent(model, [tool(read)])
    return agent.invoke({"messages": [("user", ASK)]})["messages"][-1].content


def pydantic_ai() -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("m", provider=OpenAIProvider(base_url=ADDRESS, api_key=KEY)))
    agent.tool_plain(read)
    return agent.run_sync(ASK).output


def _agents(api: str, handoff: bool = False) -> Any:
    from openai import AsyncOpenAI

    import agents

    agents.set_default_openai_client(AsyncOpenAI(base_url=ADDRESS, api_key=KEY, max_retries=0), False)
    agents.set_default_openai_api(api)  # type: ignore[arg-type]
    agents.set_tracing_disabled(True)
    writer = agents.Agent(name="writer", instructions="Say what was found.", model="m")
    reader = agents.Agent(
        name="reader",
        instructions="Read the files.",
        model="m",
        tools=[agents.function_tool(read)],
        handoffs=[writer] if handoff else [],
    )
    return agents.Runner.run_sync(reader, ASK).final_output


CLIENTS: dict[str, Callable[[], Any]] = {
    "langgraph": langgraph,
    "pydantic-ai": pydantic_ai,
    "agents": lambda: _agents("responses"),
    "agents chat": lambda: _agents("chat_completions"),
    "agents handoff": lambda: _agents("responses", handoff=True),
}

print(json.dumps(CLIENTS[os.environ["CLIENT"]]()))
