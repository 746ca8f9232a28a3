"""A node that draws rollouts of a given size at once, in the place of agents. Caller: fleet.

Run as `python -m benchmarks._fleet_node`, started like insitu_fleet.node; the number of tokens is in
the task's prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
from pathlib import Path

import numpy as np

from insitu.attempt import AttemptSpec
from insitu.types import Ledger, Rollout, Segment, Status, Timings, Trajectory
from insitu_fleet.values import pack, unpack
from insitu_train.channel.rpc import NOTHING, Frame, RpcPeer, serve_peer


def drawn(spec: AttemptSpec) -> Rollout:
    """A rollout that depends on nothing but seed and id."""
    tokens = int(spec.task.prompt)
    seed = int(hashlib.sha256(f"{spec.seed}/{spec.rollout_id}".encode()).hexdigest()[:12], 16)
    rng = np.random.default_rng(seed)
    mask = np.arange(tokens) % 2 > 0
    segment = Segment(
        rollout_id=spec.rollout_id,
        index=0,
        kind="sampled",
        label="final",
        ids=rng.integers(0, 50_000, tokens, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -rng.random(tokens, dtype=np.float32), np.float32(0)),
        versions=mask.astype(np.int32),
    )
    count = int(mask.sum())
    return Rollout(
        id=spec.rollout_id,
        task_id=spec.task.id,
        category="",
        status=Status.OK,
        reward=float(seed % 2),
        trajectory=Trajectory(segments=(segment,), turns=(), ledger=Ledger(captured=count, trained=count)),
        verdict=None,
        changed={},
        deleted=(),
        timings=Timings(),
    )


async def _main(socket: Path) -> None:
    done = asyncio.Event()
    made: dict[str, Rollout] = {}

    async def run(call: Frame) -> Frame:
        spec, _, _ = unpack(call)
        await controller.call("attempt.ready", {"key": [spec.rollout_id, spec.attempt]}, deadline_s=60.0)
        # Drawing takes longer than sending: each is drawn once, before the clock runs.
        if spec.rollout_id not in made:
            made[spec.rollout_id] = drawn(spec)
        return pack(made[spec.rollout_id], None, {}, ())

    async def nothing(call: Frame) -> Frame:
        return NOTHING

    async def beat(call: Frame) -> Frame:
        return Frame(meta={"lags": [], "sessions": []})

    handlers = {"node.open": nothing, "node.beat": beat, "attempt.run": run, "attempt.stop": nothing}
    controller = RpcPeer("the benchmark", handlers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve_peer(controller, reader, writer)
        done.set()

    async with await asyncio.start_unix_server(serve, socket):
        await done.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--lease-s", type=float, required=True)
    asyncio.run(_main(parser.parse_args(sys.argv[1:]).socket))
