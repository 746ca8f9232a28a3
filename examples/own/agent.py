"""A coding agent in 30 lines: the openai SDK and one tool. Started by agent.toml."""

import json
import os
import subprocess
import sys

from openai import OpenAI

SYSTEM = "You fix code in the current folder. Run shell commands; when you are done, say so without a call."
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
BASH = {"name": "bash", "description": "Run a shell command.", "parameters": PARAMETERS}


def run(arguments: str) -> str:
    try:
        command = json.loads(arguments)["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    except (ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        return f"error: {error!r}"
    return (done.stdout + done.stderr)[-8000:] or f"exit code {done.returncode}"


client = OpenAI()  # address and key come from OPENAI_BASE_URL and OPENAI_API_KEY
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
while True:
    reply = client.chat.completions.create(
        model=os.environ["OPENAI_MODEL"],
        messages=messages,
        tools=[{"type": "function", "function": BASH}],
    )
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = run(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
