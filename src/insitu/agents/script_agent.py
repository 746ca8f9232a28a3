"""A coding agent in 100 lines of standard library: OpenAI chat completions, Pi's read, bash and edit.

The prompt comes by stdin. Without http.client and subprocess, whose import would double its start-up time.
"""

import json
import os
import socket
import sys

Message = dict[str, object]
SYSTEM = {"role": "system", "content": "Fix the code in this folder with the tools, then say what you did."}
LIMIT, OUTPUT = 50 * 1024, "/tmp/bash-output"


def schema(fields: dict[str, object]) -> Message:
    return {"type": "object", "properties": fields, "required": list(fields)}


def tool(name: str, about: str, fields: dict[str, object]) -> Message:
    function = {"name": name, "description": about, "parameters": schema(fields)}
    return {"type": "function", "function": function}


TEXT = {"type": "string"}
EDITS = {"type": "array", "items": schema({"oldText": TEXT, "newText": TEXT})}
TOOLS = [
    tool("read", "Read a file.", {"path": TEXT}),
    tool("bash", "Run a bash command.", {"command": TEXT}),
    tool("edit", "Replace exact, unique text.", {"path": TEXT, "edits": EDITS}),
]


def read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(LIMIT)


def bash(command: str) -> str:
    code = os.spawnlp(os.P_WAIT, "bash", "bash", "-c", f"exec >{OUTPUT} 2>&1 </dev/null\n{command}")
    with open(OUTPUT, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LIMIT))
        text = file.read(LIMIT).decode("utf-8", "replace")
    status = f"Command exited with code {code if code > 0 else 128 - code}" if code else ""
    return "\n\n".join(part for part in (text, status) if part) or "(no output)"


def edit(path: str, edits: list[dict[str, str]]) -> str:
    with open(path, encoding="utf-8") as file:
        before = after = file.read()
    for old, new in ((each["oldText"], each["newText"]) for each in edits):
        count = before.count(old) if old else 0
        if count == 0:
            why = "The old text must match exactly including all whitespace and newlines."
            return f"Could not find the exact text in {path}. {why}"
        if count > 1 or after.count(old) != 1:
            why = "The text must be unique. Please provide more context to make it unique."
            return f"Found {max(count, after.count(old))} occurrences of the text in {path}. {why}"
        after = after.replace(old, new)
    if after == before:
        return f"No changes made to {path}. The replacement produced identical content."
    with open(path, "w", encoding="utf-8") as file:
        file.write(after)
    return f"Successfully replaced {len(edits)} block(s) in {path}."


def use(name: str, arguments: str) -> str:
    if name not in ("read", "bash", "edit"):
        return f"Tool {name} not found"
    try:
        return str(globals()[name](**json.loads(arguments)))
    except OSError as error:
        return f"{error.strerror}: '{error.filename}'"
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        return f'Validation failed for tool "{name}": {error}'


def ask(messages: list[Message]) -> Message:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS}).encode()
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: model\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\nContent-Length: {len(body)}\r\n\r\n"
    wire.write(head.encode() + body)
    wire.flush()
    status, size = wire.readline(), 0
    while line := wire.readline().strip():
        size = int(line[15:]) if line.lower().startswith(b"content-length:") else size
    answer = wire.read(size)
    if status.split()[1:2] != [b"200"]:
        sys.exit(f"the model answered {status!r}: {answer[:300]!r}")
    return dict(json.loads(answer)["choices"][0]["message"])


host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
wire = socket.create_connection((host.split(":")[0], int(host.split(":")[1]))).makefile("rwb")
messages: list[Message] = [{**SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
while calls := (message := ask(messages)).get("tool_calls"):
    messages.append(message)
    for call in calls if isinstance(calls, list) else ():
        result = use(call["function"]["name"], call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
