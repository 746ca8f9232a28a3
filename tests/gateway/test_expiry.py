"""A session whose wall time is over does not stay in memory: it is sealed, its record kept."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import pytest
from gateway_rig import ASK, said
from test_admin import AdminRig

from insitu.chat.template import TemplateRenderer
from insitu.serving import session_export as sealing
from insitu.serving.console import Console
from insitu.types import Limits


async def test_sessions_are_sealed_after_their_time(
    renderer: TemplateRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "EXPIRED_S", 0.05)
    monkeypatch.setattr(sealing, "POLL_S", 0.02)
    async with AdminRig(renderer, [said("x")], limits=Limits(wall_s=1.5)) as rig:
        status, opened = await rig.ask("POST", "/sessions", {"rollout_id": "../a", "limits": {"wall_s": 1.5}})
        assert status == 201
        lasting = rig.gateway.open_session("lasting", seed=0, limits=Limits(wall_s=60.0))
        assert (await rig.post({"messages": ASK}))[0] == 200
        assert (await rig.say(opened, {"messages": ASK}))[0] == 200
        own, ledgers = [rig.session, lasting], sealing.Ledgers()
        rig.session.rollout_id = "serve-0"
        voice = Console(io.StringIO(), json=True)
        expiry = asyncio.create_task(sealing.expire(voice, tmp_path, own, rig.gateway, rig.admin, ledgers))
        async with asyncio.timeout(20):
            while len(ledgers) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        assert not expiry.done()
        expiry.cancel()
        assert ledgers.keys() == {"serve-0", opened["public_id"]}
        assert all(ledger["trained"] > 0 for ledger in ledgers.values())
        assert all(os.path.exists(tmp_path / f"{name}.json") for name in ledgers)  # noqa: ASYNC240, PTH110
        assert rig.gateway.open_sessions() == own == [lasting]
        assert (await rig.ask("GET", f"/sessions/{opened['public_id']}/export"))[0] == 200
        assert (await rig.post({"messages": ASK}))[0] == 409
