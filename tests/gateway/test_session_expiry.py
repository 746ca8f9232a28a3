"""A session whose wall time is over does not stay in memory: it is sealed and stored."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from gateway_rig import ASK, said
from test_admin import AdminRig

import insitu
from insitu.chat.template import TemplateRenderer
from insitu.serving import served as serving
from insitu.serving.console import Console
from insitu.storage.run_dir import RunDir
from insitu.types import Limits


@pytest.mark.slow
async def test_sessions_are_sealed_after_their_time(
    renderer: TemplateRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "EXPIRED_S", 0.05)
    monkeypatch.setattr(serving, "POLL_S", 0.02)
    config = insitu.load_config(None, {"run.dir": str(tmp_path / "run")})
    async with AdminRig(renderer, [said("x")], limits=Limits(wall_s=1.5)) as rig:
        status, opened = await rig.ask("POST", "/sessions", {"rollout_id": "../a", "limits": {"wall_s": 1.5}})
        assert status == 201
        lasting = rig.gateway.open_session("lasting", seed=0, limits=Limits(wall_s=60.0))
        assert (await rig.post({"messages": ASK}))[0] == 200
        assert (await rig.say(opened, {"messages": ASK}))[0] == 200
        with RunDir.create(config) as run, run.store() as store:
            served = serving.Served(run, store, rig.gateway, "", None, Console(io.StringIO(), json=True))
            served.admin = rig.admin
            expiry = asyncio.create_task(served.expire())
            async with asyncio.timeout(20):
                while len(store.outcomes("serve", 0)) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            assert not expiry.done()
            expiry.cancel()
            stored = store.rollouts("serve", 0)
        assert {rollout.id for rollout in stored} == {rig.session.rollout_id, "../a"}
        assert all(rollout.trajectory.ledger.trained > 0 for rollout in stored)
        assert rig.gateway.open_sessions() == [lasting]
        assert (await rig.ask("GET", f"/sessions/{opened['public_id']}/export"))[0] == 200
        assert (await rig.post({"messages": ASK}))[0] == 409
