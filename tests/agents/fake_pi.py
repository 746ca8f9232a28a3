#!/usr/bin/python3 -S
"""Speaks Pi's protocol and does to its output what the prompt says, as an agent's command could."""

import json
import os
import sys

MESSAGE = {"role": "assistant", "stopReason": "error", "errorMessage": "e"}
ERROR = {"type": "message_end", "message": MESSAGE}
LINES = {
    "cut": b'{"type":"message_end","message":{"role":"assistant","stopReason":"error"\n',
    "list": b'{"type":"message_end","message":[{"role":"assistant","stopReason":"error"}]}\n',
    "deep": b'{"type":"message_end","message":{"role":"assistant","stopReason":"error","errorMessage":'
    + b"[" * 900
    + b"]" * 900
    + b"}}\n",
    "bytes": b'\xff\xfe{"type":"agent_settled"}\n',
    "word": b"hello\n",
    "number": b"7\n",
    "answer": b'{"id":"x","type":"response","command":"new_session","success":true}\n',
    "bad answer": b'{"type":"response"\n',
    "error": json.dumps(ERROR, separators=(",", ":")).encode() + b"\n",
}


def write(line: bytes) -> None:
    os.write(1, line)


def event(kind: str) -> bytes:
    return b'{"type":"%s"}\n' % kind.encode()


spoilt = b""
for text in sys.stdin:
    order = json.loads(text)
    if order["type"] == "new_session":
        write(spoilt)
    answer = {"id": order["id"], "type": "response", "command": order["type"], "success": True}
    write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
    if order["type"] == "prompt":
        now, _, word = order["message"].partition(" ")
        with open("/work/pid", "w") as file:
            file.write(str(os.getpid()))
        if now == "die":
            os._exit(1)
        if now == "hang":
            continue
        if now == "now":
            write(LINES[word])
        write(event("agent_settled"))
        if now == "late":
            write(LINES[word])
        spoilt = LINES[word] if now == "next" else b""
