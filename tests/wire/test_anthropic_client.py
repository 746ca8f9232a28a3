"""The official Anthropic client as oracle of the Messages format."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from gateway_rig import Rig
from wire_lab import CALLS, ONLY_CALL, SAY, SCHEMA, THINK, anthropic_client, continued, plain

from insitu.chat.template import TemplateRenderer
from insitu.errors import EngineError
from insitu.gateway.request import GatewayConfig
from insitu.types import Limits, Message

TOOLS = [{"name": "read", "description": "Read a file.", "input_schema": SCHEMA}]
ASK = [{"role": "user", "content": "Fix f."}]
REPLIES = [SAY, THINK, CALLS, ONLY_CALL]


async def ask(api: anthropic.AsyncAnthropic, stream: bool, messages: list[Any], **more: Any) -> Any:
    """One call; streamed ones as the client puts them together."""
    given = {"model": "m", "max_tokens": 4096, "messages": messages, "tools": TOOLS, **more}
    if not stream:
        return await api.messages.create(**given)
    async with api.messages.stream(**given) as events:
        return await events.get_final_message()


@pytest.mark.case(22)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", REPLIES, ids=["text", "thinking", "calls", "only_call"])
async def test_the_client_reads_every_reply_and_its_echo_continues(
    renderer: TemplateRenderer, reply: Message, stream: bool
) -> None:
    async with Rig(renderer, [reply, SAY]) as rig, anthropic_client(rig) as api:
        answer = await ask(api, stream, ASK, system="You fix code.")
        by_type: dict[str, list[Any]] = {}
        for block in answer.content:
            by_type.setdefault(block.type, []).append(block)
        assert [b.text for b in by_type.get("text", [])] == ([reply.text] if reply.text else [])
        assert [b.thinking for b in by_type.get("thinking", [])] == (
            [reply.reasoning] if reply.reasoning else []
        )
        calls = by_type.get("tool_use", [])
        assert [c.name for c in calls] == [c.name for c in reply.tool_calls]
        assert answer.stop_reason == ("tool_use" if reply.tool_calls else "end_turn")
        assert answer.usage.output_tokens == len(renderer.render_reply(reply))
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": "x"} for c in calls]
        echo = {"role": "assistant", "content": plain(answer)["content"]}
        follow = {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]}
        await ask(api, stream, [*ASK, echo, follow], system="You fix code.")
        await continued(rig, 2)


async def test_a_reply_cut_by_length_says_so(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SAY]) as rig, anthropic_client(rig) as api:
        for stream in (False, True):
            assert (await ask(api, stream, ASK, max_tokens=3)).stop_reason == "max_tokens"


@pytest.mark.case(11, 24)
async def test_cache_marks_billing_and_mid_list_system_do_not_fork(renderer: TemplateRenderer) -> None:
    """As Claude Code does: the marks move, the billing block changes, a system message stands in the list."""
    mark = {"cache_control": {"type": "ephemeral"}}
    async with Rig(renderer, [CALLS, SAY]) as rig, anthropic_client(rig) as api:

        def system(cch: str) -> list[dict[str, Any]]:
            bill = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={cch};"}
            return [bill, {"type": "text", "text": "You fix code.", **mark}]

        reminder = {"role": "system", "content": "Be brief."}
        first = [{"role": "user", "content": [{"type": "text", "text": "Fix f.", **mark}]}, reminder]
        answer = await ask(api, True, first, system=system("1f"))
        content = plain(answer)["content"]
        uses = [b for b in content if b["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": b["id"], "content": [{"type": "text", "text": "x"}]}
            for b in uses
        ]
        results[-1].update(mark)
        again = [{"role": "user", "content": "Fix f."}, reminder, {"role": "assistant", "content": content}]
        await ask(api, True, [*again, {"role": "user", "content": results}], system=system("2e"))
        await continued(rig, 2)


@pytest.mark.case(18)
async def test_arguments_whose_keys_changed_place_are_the_same_call(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [CALLS, SAY]) as rig, anthropic_client(rig) as api:
        content = plain(await ask(api, True, ASK))["content"]
        uses = [b for b in content if b["type"] == "tool_use"]
        for use in uses:
            use["input"] = dict(reversed(use["input"].items()))
        results = [{"type": "tool_result", "tool_use_id": u["id"], "content": "x"} for u in uses]
        echo = {"role": "assistant", "content": content}
        await ask(api, True, [*ASK, echo, {"role": "user", "content": results}])
        await continued(rig, 2)


async def test_tokens_are_counted_as_they_are_used(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [SAY]) as rig, anthropic_client(rig) as api:
        counted = await api.messages.count_tokens(
            model="m", messages=ASK, tools=TOOLS, system="You fix code."
        )
        answer = await ask(api, False, ASK, system="You fix code.")
        assert counted.input_tokens == answer.usage.input_tokens > 0


async def test_errors_have_the_classes_that_clients_expect(renderer: TemplateRenderer) -> None:
    limits = Limits(max_context_tokens=40)
    async with (
        Rig(renderer, [SAY], limits=limits) as rig,
        anthropic_client(rig) as api,
        anthropic_client(rig, "sk-no") as stranger,
    ):
        with pytest.raises(anthropic.AuthenticationError):
            await ask(stranger, False, ASK)
        with pytest.raises(anthropic.BadRequestError, match="prefill"):
            await ask(api, False, [*ASK, {"role": "assistant", "content": "{"}])
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 40 maximum"):
            await ask(api, True, ASK)
        assert [m.id async for m in api.models.list()] == ["policy"]
        assert (await api.models.retrieve("m")).id == "policy"


async def test_a_failure_after_the_headers_is_an_error_in_the_stream(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(hold_headers_s=0.01, keep_alive_s=0.01)
    rig_ = Rig(renderer, [SAY], config=config, delay_s=0.1, fail=lambda key: EngineError("gone"))
    async with rig_ as rig, anthropic_client(rig) as api:
        with pytest.raises(anthropic.APIStatusError, match="The model server failed"):
            await ask(api, True, ASK)
        assert rig.session.stats.infra_error == "gone"


async def test_a_waiting_stream_is_pinged(renderer: TemplateRenderer) -> None:
    config = GatewayConfig(hold_headers_s=0.01, keep_alive_s=0.01)
    async with Rig(renderer, [SAY], config=config, delay_s=0.1) as rig, anthropic_client(rig) as api:
        assert (await ask(api, True, ASK)).content[0].text == SAY.text
