"""Images, sound and files for a model that reads only text: one line, and the session goes on."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from gateway_rig import Rig, call

from insitu.chat.template import TemplateRenderer
from insitu.gateway.routes import parse_path
from insitu.gateway.server import DIALECTS
from insitu.types import PARTS_LEFT_OUT, Message, Rollout, Status, Timings
from insitu_train.step_metrics import _means

PNG = "iVBORw0KGgo="
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
TEXT = base64.b64encode("Zeile ä".encode()).decode()
READ = Message(role="assistant", text="I look.", tool_calls=(call("read", '{"path": "plot.png"}'),))
DONE = Message(role="assistant", text="Done.")
LINE = "[{} left out: this model reads text]"
PATHS = {
    "chat": "v1/chat/completions",
    "anthropic": "v1/messages",
    "responses": "v1/responses",
    "gemini": "v1beta/models/m:generateContent",
}


def blob(mime: str, data: str) -> dict[str, Any]:
    return {"inlineData": {"mimeType": mime, "data": data}}


CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
MESSAGES_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
INPUT_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}


def document(source: object) -> dict[str, Any]:
    return {"type": "document", "source": source}


PARTS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", CHAT_IMAGE, LINE.format("image")),
    ("chat", {"type": "image_url"}, LINE.format("image")),
    ("chat", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, LINE.format("audio")),
    ("chat", {"type": "video_url", "video_url": {"url": "http://10.0.0.1/v"}}, LINE.format("video")),
    ("chat", {"type": "file", "file": {"file_id": "f"}}, LINE.format("file")),
    ("chat", {"type": "file", "file": {"file_data": f"data:text/plain;base64,{TEXT}"}}, "Zeile ä"),
    ("chat", {"type": "file", "file": {"file_data": "data:text/plain;base64,/w=="}}, LINE.format("file")),
    ("anthropic", MESSAGES_IMAGE, LINE.format("image")),
    ("anthropic", {"type": "image", "source": {"type": "url", "url": "http://a/b"}}, LINE.format("image")),
    ("anthropic", {"type": "image", "source": {"type": "file", "file_id": "f"}}, LINE.format("image")),
    ("anthropic", document(PDF), LINE.format("document")),
    ("anthropic", document({"type": "file", "file_id": "f"}), LINE.format("document")),
    ("anthropic", document({"type": "text", "media_type": "text/plain", "data": "said"}), "said"),
    ("anthropic", document({"type": "content", "content": "said"}), "said"),
    (
        "anthropic",
        document({"type": "content", "content": [{"type": "text", "text": "said"}, MESSAGES_IMAGE]}),
        "said\n" + LINE.format("image"),
    ),
    (
        "anthropic",
        {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "said"}]},
        "T\nsaid",
    ),
    ("responses", INPUT_IMAGE, LINE.format("image")),
    ("responses", {"type": "input_image", "file_id": "f"}, LINE.format("image")),
    ("responses", {"type": "input_file", "file_url": "http://10.0.0.1/a.pdf"}, LINE.format("file")),
    ("responses", {"type": "input_file", "file_data": f"data:text/csv;base64,{TEXT}"}, "Zeile ä"),
    ("responses", {"type": "input_audio", "input_audio": {}}, LINE.format("audio")),
    ("gemini", blob("image/png", PNG), LINE.format("image")),
    ("gemini", blob("audio/wav", PNG), LINE.format("audio")),
    ("gemini", blob("video/mp4", PNG) | {"videoMetadata": {"fps": 1}}, LINE.format("video")),
    ("gemini", blob("application/pdf", PNG), LINE.format("file")),
    ("gemini", blob("text/plain", TEXT), "Zeile ä"),
    ("gemini", {"file_data": {"mime_type": "text/plain", "file_uri": "http://a"}}, LINE.format("file")),
]


def asked(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """A body whose one message holds a part."""
    if name == "gemini":
        return {"contents": [{"role": "user", "parts": [{"text": "see"}, part]}]}
    key, text = ("input", "input_text") if name == "responses" else ("messages", "text")
    return {key: [{"role": "user", "content": [{"type": text, "text": "see"}, part]}]}


def answered(name: str, part: dict[str, Any]) -> dict[str, Any]:
    """A body whose last message is a tool's answer that holds a part."""
    if name == "chat":
        called = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        said = {"role": "assistant", "content": None, "tool_calls": [called]}
        return {
            "messages": [{"role": "user"}, said, {"role": "tool", "tool_call_id": "c", "content": [part]}]
        }
    if name == "anthropic":
        said = {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "read", "input": {}}],
        }
        result = {"type": "tool_result", "tool_use_id": "c", "content": [part]}
        return {"messages": [{"role": "user"}, said, {"role": "user", "content": [result]}]}
    if name == "responses":
        said = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
        return {"input": [said, {"type": "function_call_output", "call_id": "c", "output": [part]}]}
    said = {"role": "model", "parts": [{"functionCall": {"id": "c", "name": "read"}}]}
    result = {"functionResponse": {"id": "c", "name": "read", "response": {"output": "got"}, "parts": [part]}}
    return {"contents": [{"parts": [{"text": "x"}]}, said, {"role": "user", "parts": [result]}]}


@pytest.mark.case(50)
@pytest.mark.parametrize(("name", "part", "text"), PARTS)
def test_a_part_without_text_is_one_line_in_messages_and_in_answers_of_tools(
    name: str, part: dict[str, Any], text: str
) -> None:
    route = parse_path("/" + PATHS[name])
    assert route is not None
    parse = DIALECTS[name].parse
    assert parse(asked(name, part), route.action).request.messages[-1].text == f"see\n{text}"
    result = parse(answered(name, part), route.action).request.messages[-1]
    assert (result.role, result.tool_call_id) == ("tool", "c")
    assert result.text == (f"got\n{text}" if name == "gemini" else text)


def tools(name: str) -> list[dict[str, Any]]:
    shape = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {
        "chat": [{"type": "function", "function": {"name": "read", "parameters": shape}}],
        "anthropic": [{"name": "read", "input_schema": shape}],
        "responses": [{"type": "function", "name": "read", "parameters": shape}],
        "gemini": [{"functionDeclarations": [{"name": "read", "parameters": shape}]}],
    }[name]


def grown(name: str, body: dict[str, Any], reply: dict[str, Any], picture: bool) -> None:
    """Add a reply, and the answer to its call or another question, as each client does."""
    if name == "chat":
        said = reply["choices"][0]["message"]
        more = {"role": "user", "content": "Go on."}
        if picture:
            more = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": [CHAT_IMAGE]}
        body["messages"] += [said, more]
    elif name == "anthropic":
        more = {"type": "text", "text": "Go on."}
        if picture:
            more = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"]}
            more |= {"content": [MESSAGES_IMAGE]}
        body["messages"] += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [more]},
        ]
    elif name == "responses":
        more = {"role": "user", "content": "Go on."}
        if picture:
            more = {"type": "function_call_output", "call_id": reply["output"][-1]["call_id"]}
            more |= {"output": [INPUT_IMAGE]}
        body["input"] += [*reply["output"], more]
    else:
        said = reply["candidates"][0]["content"]
        more = {"text": "Go on."}
        if picture:
            called = said["parts"][-1]["functionCall"]
            more = {"functionResponse": {"id": called["id"], "name": "read", "response": {"output": "ok"}}}
            more["functionResponse"]["parts"] = [blob("image/png", PNG)]
        body["contents"] += [said, {"role": "user", "parts": [more]}]


@pytest.mark.parametrize("name", PATHS)
async def test_a_session_goes_on_after_a_picture_and_every_later_request_continues_it(
    renderer: TemplateRenderer, name: str
) -> None:
    body: dict[str, Any] = {"tools": tools(name)}
    if name == "gemini":
        body["contents"] = [{"role": "user", "parts": [{"text": "Look."}]}]
    else:
        body["input" if name == "responses" else "messages"] = [{"role": "user", "content": "Look."}]
        body |= {"max_tokens": 99} if name == "anthropic" else {}
        body |= {"store": False} if name == "responses" else {}
    async with Rig(renderer, [READ, DONE]) as rig:
        url = f"{rig.base.removesuffix('/v1')}/{PATHS[name]}"
        for turn in range(4):
            async with rig.http.post(url, json=body, headers=rig.auth) as response:
                assert response.status == 200, await response.text()
                grown(name, body, await response.json(), picture=turn == 0)
        trajectory = await rig.sealed()
        shown = renderer.decode(rig.engine.sent[3].ids)
    assert shown.count(LINE.format("image")) == 1
    assert (rig.session.stats.left_out, rig.session.stats.edited, rig.session.stats.forks) == (1, 0, 0)
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1, 2]
    assert [turn.index for turn in trajectory.turns if ("dropped_part", "image") in turn.hints] == [1]
    assert [turn.index for turn in trajectory.turns if PARTS_LEFT_OUT in turn.labels] == [1]
    rollout = Rollout(
        id="r/0",
        task_id="t",
        category="",
        status=Status.OK,
        reward=1.0,
        trajectory=trajectory,
        verdict=None,
        changed={},
        deleted=(),
        timings=Timings(),
        attempt=1,
        error="",
    )
    assert _means([rollout])["parts_left_out"] == 1
    assert trajectory.ledger.excluded == {}


async def test_a_body_of_images_longer_than_any_prompt_is_read(renderer: TemplateRenderer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (5 << 20)}}
    body = json.dumps({"messages": [{"role": "user", "content": [image, image]}]}).encode()
    async with Rig(renderer, [DONE]) as rig:
        url = f"{rig.base}/chat/completions"
        async with rig.http.post(url, data=io.BytesIO(body), headers=rig.auth) as response:
            assert response.status == 200
    assert rig.session.stats.left_out == 2
