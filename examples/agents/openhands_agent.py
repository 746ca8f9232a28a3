"""The OpenHands SDK as the agent, with its terminal and its file editor. Needs Python 3.12 or newer."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

model = LLM(
    model="openai/" + os.environ["OPENAI_MODEL"],
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
talk = Conversation(agent=agent, workspace=os.getcwd(), visualizer=None)
talk.send_message(sys.stdin.read())
talk.run()
