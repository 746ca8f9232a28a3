"""Streams are well-formed however the network cuts them."""

from __future__ import annotations

from gateway_rig import ASK, TOOLS, Rig, call, chunks_of

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects.base import SSE_KEEP_ALIVE
from insitu.gateway.request import GatewayConfig
from insitu.types import Message


class SseParser:
    """A reader of the event-stream format, fed with whatever pieces arrive."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._buffer = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> None:
        self._buffer += piece
        while b"\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\n", 1)
            text = line.decode()
            if not text and self._data:
                self.events.append("\n".join(self._data))
                self._data = []
            elif text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            else:
                assert not text or text.startswith(":")


async def test_every_cut_gives_the_same_events(renderer: TemplateRenderer) -> None:
    reply = Message(role="assistant", text="Édith 🙂\r\n\n", tool_calls=(call("read", '{"path": "日本"}'),))
    config = GatewayConfig(hold_headers_s=0.01, keep_alive_s=0.02)
    async with Rig(renderer, [reply], config=config, delay_s=0.5) as rig:
        body = {"messages": ASK, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
        raw = await rig.stream(body)
    assert raw.count(SSE_KEEP_ALIVE) >= 2
    whole = SseParser()
    whole.feed(raw)
    assert whole.events[-1] == "[DONE]"
    assert len(whole.events) == 1 + len(chunks_of(raw)) == 6
    for cut in range(len(raw)):
        parser = SseParser()
        parser.feed(raw[:cut])
        assert parser.events == whole.events[: len(parser.events)]
        parser.feed(raw[cut:])
        assert parser.events == whole.events
