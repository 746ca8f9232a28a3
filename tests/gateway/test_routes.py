"""Every path an agent may use, and what none of them gives away."""

from __future__ import annotations

import pytest
from gateway_rig import ASK, TOOLS, Rig, said
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.chat.template import TemplateRenderer
from insitu.gateway.dialects.chat import ChatDialect
from insitu.gateway.routes import Route, dialect_of, parse_path
from insitu.types import Limits


@pytest.mark.parametrize("prefix", ["", "/s/abc", "/rollout/abc"])
@pytest.mark.parametrize(
    ("path", "dialect", "kind"),
    [
        ("/v1/chat/completions", "chat", "call"),
        ("/v1/messages", "anthropic", "call"),
        ("/v1/messages/count_tokens", "anthropic", "count"),
        ("/v1/responses", "responses", "call"),
        ("/v1/responses/input_tokens", "responses", "count"),
        ("/v1/models", "", "models"),
        ("/v1/models/gpt-9", "", "model"),
        ("/v1beta/models", "gemini", "models"),
        ("/v1beta/models/gemini-9", "gemini", "model"),
        ("/v1beta/models/gemini-9:generateContent", "gemini", "call"),
        ("/v1beta/models/gemini-9:streamGenerateContent", "gemini", "call"),
        ("/v1beta/models/gemini-9:countTokens", "gemini", "count"),
        ("/v1/models/gemini-9:generateContent", "gemini", "call"),
        ("/v1alpha/models/gemini-9:generateContent", "gemini", "call"),
        ("/v1alpha/models", "gemini", "models"),
        ("/api/hello", "anthropic", "hello"),
        ("/exit", "", "exit"),
        ("/v1/exit", "", "exit"),
        ("/v1/tools/submit", "", "tool"),
        ("/mcp", "", "mcp"),
    ],
)
def test_paths(prefix: str, path: str, dialect: str, kind: str) -> None:
    route = parse_path(prefix + path)
    assert route is not None
    assert (route.dialect, route.kind) == (dialect, kind)
    assert route.public_id == ("abc" if prefix else None)


def test_a_tool_is_named_behind_its_session() -> None:
    assert parse_path("/tools/abc/submit") == Route(public_id="abc", dialect="", action="submit", kind="tool")
    assert parse_path("/tools/abc/submit/more") is None


@pytest.mark.parametrize(
    "path",
    [
        *("/", "", "/v1", "/v2/messages", "/v1/embeddings", "/s/abc", "/s//v1/x", "/admin"),
        "/v1beta/models/gemini-9:batchEmbedContents",
    ],
)
def test_what_is_no_path(path: str) -> None:
    assert parse_path(path) is None


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_no_path_breaks_it(path: str) -> None:
    dialect_of(path)
    route = parse_path(path)
    assert route is None or route.methods


async def test_the_compatibility_prefix_serves_by_both_ids(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        session = rig.gateway.open_session("rollout-7", seed=1, limits=Limits(max_context_tokens=4096))
        auth = {"Authorization": f"Bearer {session.secret}"}
        for name, key, status in (
            ("rollout-7", auth, 200),
            (session.public_id, auth, 200),
            ("rollout-7", rig.auth, 401),
            ("rollout-7", {}, 401),
            ("rollout-8", auth, 401),
        ):
            url = f"{rig.origin}/rollout/{name}/v1/chat/completions"
            async with rig.http.post(url, json={"messages": ASK}, headers=key) as response:
                assert response.status == status, name


async def test_hello_health_and_models(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        prefix = f"{rig.origin}/s/{rig.session.public_id}"
        for path in ("/api/hello", prefix.removeprefix(rig.origin) + "/api/hello", "/health", "/healthz"):
            async with rig.http.head(rig.origin + path) as response:
                assert response.status == 200
        async with rig.http.get(f"{prefix}/v1/models") as response:
            assert response.status == 401
        async with rig.http.get(f"{prefix}/v1/models", headers=rig.auth) as response:
            assert [m["id"] for m in (await response.json())["data"]] == ["policy"]
        async with rig.http.get(f"{prefix}/v1/models/any", headers=rig.auth) as response:
            assert (await response.json())["id"] == "policy"
        async with rig.http.get(f"{prefix}/v1/chat/completions", headers=rig.auth) as response:
            assert response.status == 405


async def test_exit_closes_the_session_for_the_agent_only(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        assert (await rig.post({"messages": ASK}))[0] == 200
        url = f"{rig.origin}/rollout/{rig.session.public_id}/exit"
        async with rig.http.post(url) as response:
            assert response.status == 401
        for _ in range(2):
            async with rig.http.post(url, headers=rig.auth) as response:
                assert (response.status, await response.json()) == (200, {"status": "closed"})
        status, body = await rig.post({"messages": ASK})
        assert (status, body["error"]["code"]) == (409, "session_closed")
        assert rig.session.state == "live"
        trajectory = await rig.session.seal(1.0)
        assert trajectory.ledger.trained == rig.session.stats.sampled_tokens > 0


async def test_a_count_is_what_the_call_would_send_and_changes_nothing(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("first"), said("second")]) as rig:
        dialect = ChatDialect()
        body = {"messages": ASK, "tools": TOOLS}
        counts = [await rig.session.count_tokens(dialect.parse(body, "").request)]
        assert rig.session.stats.calls == 0
        _, reply = await rig.post(body)
        echo = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
        body = {**body, "messages": [*ASK, echo, {"role": "user", "content": "more <|im_end|>"}]}
        counts += [await rig.session.count_tokens(dialect.parse(body, "").request) for _ in range(2)]
        assert rig.session.stats.injections == 0
        await rig.post(body)
        counts.append(await rig.session.count_tokens(dialect.parse(body, "").request))
        first, second = (len(sent.ids) for sent in rig.engine.sent)
        assert counts == [first, second, second, second]
        stats = rig.session.stats
        assert (stats.edited, stats.forks, stats.injections) == (0, 0, 1)
        assert [t.parent for t in (await rig.session.seal(1.0)).turns] == [-1, 0]


async def test_what_an_agent_says_of_itself_labels_its_turns_and_steers_nothing(
    renderer: TemplateRenderer,
) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        echo = {"role": "assistant", "content": "x"}
        for agent, more in (("sub-1", []), ("sub-2" + "x" * 500, [echo, {"role": "user", "content": "on"}])):
            body = {"messages": [*ASK, *more]}
            assert (await rig.post(body, **{"x-claude-code-agent-id": agent}))[0] == 200
        turns = (await rig.session.seal(1.0)).turns
        reported = [dict(turn.hints)["x-claude-code-agent-id"] for turn in turns]
        assert reported == ["sub-1", "sub-2" + "x" * 123]
        # Another agent by its own word, and yet the same line.
        assert [turn.parent for turn in turns] == [-1, 0]


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_a_method_of_a_model_that_is_not_served_is_unknown(
    renderer: TemplateRenderer, version: str
) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        base = f"{rig.base.removesuffix('/v1')}/{version}/models"
        for method in ("batchEmbedContents", "embedContent", "predict"):
            async with rig.http.post(f"{base}/m:{method}", json={}, headers=rig.auth) as response:
                assert response.status == 404
        async with rig.http.post(f"{base}/m", json={}, headers=rig.auth) as response:
            assert response.status == 405
        async with rig.http.get(f"{rig.base}/models/m:8b", headers=rig.auth) as response:
            assert (await response.json())["id"] == "policy"


async def test_an_error_names_its_request_as_its_headers_do(renderer: TemplateRenderer) -> None:
    async with Rig(renderer, [said("x")]) as rig:
        url = f"{rig.base}/messages"
        async with rig.http.post(url, json={"messages": []}, headers=rig.auth) as response:
            error = await response.json()
            assert error["request_id"] == response.headers["request-id"]
            assert error["request_id"].startswith("req_")
