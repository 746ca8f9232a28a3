"""The operator's listener: what it does, and that no other client can."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from gateway_rig import ASK, TOOLS, Rig, call, said

from insitu.chat.template import TemplateRenderer
from insitu.errors import ConfigError
from insitu.gateway.admin import Admin
from insitu.types import Limits, Message

SUBMIT = {"name": "submit", "description": "Hand in.", "parameters": {"type": "object"}}


class AdminRig(Rig):
    """A rig with an operator's listener."""

    async def __aenter__(self) -> AdminRig:
        await super().__aenter__()
        self.admin = Admin(self.gateway, limits=Limits(max_context_tokens=100_000), sealed_kept=2)
        listener = await self._stack.enter_async_context(self.admin.listen_tcp())
        self.admin_origin = listener.origin
        self.admin_auth = {"Authorization": f"Bearer {self.admin.secret}"}
        return self

    async def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        headers = self.admin_auth if headers is None else headers
        url = self.admin_origin + path
        async with self.http.request(method, url, json=body, headers=headers) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.read()

    async def say(self, opened: dict[str, Any], body: object) -> tuple[int, Any]:
        url = f"{self.origin}{opened['path']}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {opened['secret']}"}
        async with self.http.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()


async def test_a_session_from_opening_to_export(renderer: TemplateRenderer) -> None:
    reply = Message(role="assistant", tool_calls=(call("submit", "{}"),))
    async with AdminRig(renderer, [reply, said("Done.")], version=3) as rig:
        body = {
            "rollout_id": "task-1",
            "seed": 5,
            "temperature": 0.6,
            "limits": {"max_calls": 2, "wall_s": 60.0},
            "tools": [SUBMIT],
        }
        status, opened = await rig.ask("POST", "/sessions", body)
        assert (status, opened["state"]) == (201, "open")
        name = opened["public_id"]
        assert (await rig.say(opened, {"messages": ASK, "tools": TOOLS}))[0] == 200
        assert (await rig.ask("GET", f"/sessions/{name}/export"))[0] == 409
        _, reported = await rig.ask("GET", f"/sessions/{name}")
        assert (reported["state"], reported["stats"]["calls"], reported["tool_calls"]) == ("live", 1, 1)
        _, listed = await rig.ask("GET", "/sessions")
        assert [s["rollout_id"] for s in listed["sessions"]] == ["task-1"]
        assert not {opened["secret"], opened["tool_secret"]} & set(str(listed).split("'"))
        _, calls = await rig.ask("GET", f"/sessions/{name}/calls")
        assert [c["name"] for c in calls["calls"]] == ["submit"]
        status, sealed = await rig.ask("POST", f"/sessions/{name}/seal", {"deadline_s": 1.0})
        assert (status, sealed["state"]) == (200, "sealed")
        assert sealed["ledger"]["captured"] == sealed["ledger"]["trained"] > 0
        assert (await rig.ask("POST", f"/sessions/{name}/seal"))[1]["ledger"] == sealed["ledger"]
        assert (await rig.say(opened, {"messages": ASK}))[0] == 409
        _, exported = await rig.ask("GET", f"/sessions/{name}/export?format=json")
        _, raw = await rig.ask("GET", f"/sessions/{name}/export?format=npz")
        arrays = np.load(io.BytesIO(raw))
        assert exported["temperature"] == float(arrays["temperature"]) == 0.6
        row = exported["rows"][0]
        sent = rig.engine.sent[0]
        assert row["ids"][: len(sent.ids)] == sent.ids.tolist()
        assert arrays["ids"].tolist() == row["ids"]
        assert arrays["mask"].tolist() == row["mask"]
        assert arrays["logprobs"].tolist() == pytest.approx(row["logprobs"])
        assert set(arrays["versions"][arrays["mask"]]) == {3}
        assert arrays["offsets"].tolist() == [0, len(row["ids"])]
        for query in ("form=rows", "format=pickle"):
            assert (await rig.ask("GET", f"/sessions/{name}/export?{query}"))[0] == 400
        assert (await rig.ask("DELETE", f"/sessions/{name}"))[0] == 200
        assert (await rig.ask("GET", f"/sessions/{name}"))[0] == 404


@pytest.mark.case(53)
async def test_only_the_admin_secret_opens_it_and_it_opens_nothing_else(renderer: TemplateRenderer) -> None:
    async with AdminRig(renderer, [said("x")]) as rig:
        _, opened = await rig.ask("POST", "/sessions", {"tools": [SUBMIT]})
        for secret in (opened["secret"], opened["tool_secret"], "x" * 43, ""):
            for method, path in (
                ("GET", "/sessions"),
                ("POST", "/sessions"),
                ("POST", f"/sessions/{opened['public_id']}/seal"),
                ("GET", f"/sessions/{opened['public_id']}/export"),
                ("DELETE", f"/sessions/{opened['public_id']}"),
                ("GET", "/stats"),
            ):
                headers = {"Authorization": f"Bearer {secret}"}
                assert (await rig.ask(method, path, headers=headers))[0] == 401
        assert (await rig.ask("GET", "/sessions", headers={}))[0] == 401
        # The other way round, and admin paths where agents are served.
        status, _ = await rig.say({**opened, "secret": rig.admin.secret}, {"messages": ASK})
        assert status == 401
        tool = f"{rig.origin}/tools/{opened['public_id']}/submit"
        async with rig.http.post(tool, json={}, headers=rig.admin_auth) as response:
            assert response.status == 401
        for path in ("/sessions", f"/sessions/{opened['public_id']}/seal", "/stats"):
            for secret in (opened["secret"], rig.admin.secret):
                headers = {"Authorization": f"Bearer {secret}"}
                async with rig.http.post(rig.origin + path, json={}, headers=headers) as response:
                    assert response.status == 404
        assert not rig.engine.sent


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"limit": {}}, 400, "limit"),
        ({"limits": {"max_calls": 0}}, 400, "limits.max_calls"),
        ({"temperature": 0.0}, 400, "temperature"),
        ({"temperature": 0.04}, 400, "temperature: Input should be greater than or equal to 0.05"),
        ({"seed": "1"}, 400, "seed"),
        ({"tools": [{"name": "reset", "parameters": {"type": "object"}}]}, 400, "reset"),
        ({"tools": [SUBMIT, SUBMIT]}, 400, "different names"),
        ({"rollout_id": ""}, 400, "rollout_id"),
        ([], 400, "object"),
    ],
)
async def test_bad_requests_are_one_clear_line(
    renderer: TemplateRenderer, body: object, status: int, word: str
) -> None:
    async with AdminRig(renderer, [said("x")]) as rig:
        got, answer = await rig.ask("POST", "/sessions", body)
        assert got == status
        assert word in answer["error"]["message"]
        assert "\n" not in answer["error"]["message"]
        assert (await rig.ask("GET", "/sessions"))[1] == {"sessions": []}


async def test_it_is_bounded(renderer: TemplateRenderer) -> None:
    async with AdminRig(renderer, [said("x")]) as rig:
        names = []
        for i in range(4):
            _, opened = await rig.ask("POST", "/sessions", {"rollout_id": f"r{i}"})
            names.append(opened["public_id"])
        assert (await rig.ask("POST", "/sessions", {"rollout_id": "r0"}))[0] == 409
        for name in names:
            assert (await rig.ask("POST", f"/sessions/{name}/seal"))[0] == 200
        found = [(await rig.ask("GET", f"/sessions/{name}"))[0] for name in names]
        assert found == [404, 404, 200, 200]
        full = Admin(rig.gateway, max_sessions=1)
        async with full.listen_tcp() as listener:
            auth = {"Authorization": f"Bearer {full.secret}"}
            for status in (201, 429):
                async with rig.http.post(f"{listener.origin}/sessions", json={}, headers=auth) as response:
                    assert response.status == status


async def test_deleting_an_open_session_aborts_its_calls(renderer: TemplateRenderer) -> None:
    async with AdminRig(renderer, [said("x")], delay_s=30.0) as rig:
        _, opened = await rig.ask("POST", "/sessions", {})
        running = asyncio.create_task(rig.say(opened, {"messages": ASK}))
        async with asyncio.timeout(3.0):
            while not rig.engine.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await rig.ask("DELETE", f"/sessions/{opened['public_id']}"))[0] == 200
        assert (await running)[0] == 409
        assert len(rig.engine.aborted) == 1


def test_a_short_secret_is_refused(renderer: TemplateRenderer) -> None:
    with pytest.raises(ConfigError, match="16 characters"):
        Admin(None, secret="short")  # type: ignore[arg-type]
