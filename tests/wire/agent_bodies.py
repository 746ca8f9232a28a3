"""Bodies as agents send them, small: one conversation per wire format, growing turn by turn."""

from __future__ import annotations

from typing import Any

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def chat() -> dict[str, Any]:
    """OpenCode, Pi and mini-swe-agent: text as string or parts, arguments as a JSON text."""
    call = {"id": "call_1", "type": "function", "index": 0}
    call |= {"function": {"name": "read", "arguments": '{"path":"a.py"}'}}
    return {
        "model": "policy",
        "messages": [
            {"role": "developer", "content": "You fix code."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Fix f."}, {"type": "text", "text": "Now."}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Which file?",
                "tool_calls": [call, {**call, "id": "call_2"}],
                "provider_specific_fields": {"refusal": None},
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "y"}]},
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "And g?"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "read", "description": "Read.", "parameters": SCHEMA, "strict": False},
            }
        ],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 500,
        "temperature": 0.2,
        "stop": ["\nHuman:"],
        "metadata": {"session": "s"},
    }


def anthropic() -> dict[str, Any]:
    """Claude Code: billing block, moving cache marks, mid-list system, thinking with signatures."""
    return {
        "model": "policy",
        "max_tokens": 500,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00;"},
            {"type": "text", "text": "You fix code.", **MARK},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>r</system-reminder>"}]},
            {"role": "user", "content": [{"type": "text", "text": "Fix f."}]},
            {"role": "system", "content": "Be brief."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Which file?", "signature": "c2ln"},
                    {"type": "redacted_thinking", "data": "AAAA"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "call_1", "name": "read", "input": {"path": "a.py"}},
                    {"type": "tool_use", "id": "call_2", "name": "read", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "x = 1"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no path"}],
                        **MARK,
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "And g?"},
        ],
        "tools": [
            {"name": "read", "description": "Read.", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": '{"session_id":"s"}'},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "stop_sequences": ["\n\nHuman:"],
        "stream": True,
    }


def responses() -> dict[str, Any]:
    """Codex: developer messages, namespaces, free-form tools, reasoning items."""

    def text(role: str, kind: str, *texts: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": t} for t in texts]}

    spawn = {"type": "function", "name": "spawn", "description": "", "parameters": SCHEMA}
    reasoning = {"type": "reasoning", "id": "rs_1", "encrypted_content": "AAAA"}
    reasoning |= {"summary": [{"type": "summary_text", "text": "Which file?"}], "content": None}
    call = {"type": "function_call", "call_id": "call_2", "name": "spawn", "arguments": '{"path": "a"}'}
    return {
        "model": "policy",
        "instructions": "You fix code.",
        "input": [
            text("developer", "input_text", "Be brief."),
            text("user", "input_text", "Context.", "Fix f."),
            reasoning,
            text("assistant", "output_text", "I look."),
            {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": "*** x"},
            {**call, "namespace": "agents"},
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"},
            {
                "type": "function_call_output",
                "call_id": "call_2",
                "output": [{"type": "input_text", "text": "ok"}],
            },
            text("assistant", "output_text", "Done."),
            text("user", "input_text", "And g?"),
        ],
        "tools": [
            {
                "type": "function",
                "name": "read",
                "description": "Read.",
                "strict": False,
                "parameters": SCHEMA,
            },
            {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [spawn]},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
            },
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream": True,
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
        "text": {"verbosity": "low"},
    }


def gemini() -> dict[str, Any]:
    """Gemini CLI: calls and responses as parts, signatures, JSON schemas beside OpenAPI ones."""
    call = {"functionCall": {"id": "call_1", "name": "read", "args": {"path": "a.py"}}}
    result = {"functionResponse": {"id": "call_1", "name": "read", "response": {"output": "x = 1"}}}
    return {
        "systemInstruction": {"role": "user", "parts": [{"text": "You fix code."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Context."}, {"text": "Fix f."}]},
            {
                "role": "model",
                "parts": [
                    {"text": "Which file?", "thought": True},
                    {"text": "I look.", "thoughtSignature": "c2ln"},
                    call,
                    {"functionCall": {"name": "read", "args": {}}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    result,
                    {"functionResponse": {"name": "read", "response": {"error": "no path"}}},
                    {"text": "Go on."},
                ],
            },
            {"role": "model", "parts": [{"text": "Done."}]},
            {"role": "user", "parts": [{"text": "And g?"}]},
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "read", "description": "Read.", "parametersJsonSchema": SCHEMA},
                    {"name": "list", "parameters": {"type": "OBJECT"}},
                ]
            },
            {"googleSearch": {}},
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {
            "temperature": 1,
            "topP": 0.95,
            "topK": 64,
            "maxOutputTokens": 500,
            "stopSequences": ["\nHuman:"],
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8192},
        },
        "labels": {"a": "b"},
    }


BODIES = {"chat": chat, "anthropic": anthropic, "responses": responses, "gemini": gemini}

PATHS = {
    "chat": ("/v1/chat/completions",),
    "anthropic": ("/v1/messages?beta=true", "/v1/messages/count_tokens"),
    "responses": ("/v1/responses", "/v1/responses/input_tokens"),
    "gemini": (
        "/v1beta/models/m:generateContent",
        "/v1beta/models/m:streamGenerateContent?alt=sse",
        "/v1beta/models/m:streamGenerateContent",
        "/v1beta/models/m:countTokens",
    ),
}
