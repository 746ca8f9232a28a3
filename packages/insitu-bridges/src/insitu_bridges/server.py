"""The child process of a rollout source: answers the calls of one client, see process.py.

Run as `python -m insitu_bridges.server --socket PATH --config FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from insitu.config import Config, load_config
from insitu.errors import InsituError
from insitu.storage.run_dir import name_run
from insitu_bridges.source import RolloutSource, open_rollout_source
from insitu_train.channel.parent_watch import child_parser, main_of_child
from insitu_train.channel.rpc import NOTHING, Frame, Handler, RpcPeer, serve_peer

NO_CLIENT_S = 60.0
"""The process ends when no client connects for so long."""


def _handlers(source: RolloutSource) -> Mapping[str, Handler]:
    async def run(call: Frame) -> Frame:
        meta = call.meta
        rollout = await source.run(meta["task"], int(meta["key"]), evaluation=bool(meta["evaluation"]))
        return Frame(meta={"rollout": rollout.id})

    async def following(call: Frame) -> Frame:
        batch = await source.next()
        groups = [[group.id, group.task_id, [r.id for r in group.rollouts]] for group in batch.groups]
        return Frame(meta={"step": batch.step, "version": batch.version, "groups": groups})

    async def pause(call: Frame) -> Frame:
        source.pause(int(call.meta["version"]))
        return NOTHING

    async def load(call: Frame) -> Frame:
        await source.load(int(call.meta["version"]))
        return NOTHING

    async def version(call: Frame) -> Frame:
        source.version(int(call.meta["version"]))
        return NOTHING

    return {
        "source.run": run,
        "source.next": following,
        "source.pause": pause,
        "source.load": load,
        "source.version": version,
    }


async def _offer(config: Config, client: RpcPeer, opened: asyncio.Future[Frame], stop: asyncio.Event) -> None:
    """Open the source and answer with it until stopped; a failed start is the answer to `source.open`."""
    try:
        async with open_rollout_source(config) as source:
            client.handlers |= _handlers(source)
            opened.set_result(NOTHING)
            await stop.wait()
    except InsituError as error:
        if opened.done():
            raise
        opened.set_exception(error)
        await stop.wait()


async def _main(socket: Path, config: Config) -> None:
    connected, stop = asyncio.Event(), asyncio.Event()
    opened: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    async def wait_open(call: Frame) -> Frame:
        return await asyncio.shield(opened)

    client = RpcPeer("the trainer", {"source.open": wait_open})

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        try:
            await serve_peer(client, reader, writer)
        finally:
            stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with await asyncio.start_unix_server(serve, socket):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(connected.wait(), NO_CLIENT_S)
            offering = asyncio.create_task(_offer(config, client, opened, stop))
            gone = asyncio.create_task(stop.wait())
            await asyncio.wait({offering, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not opened.done():  # else it ends by itself
                offering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await offering


def main(argv: list[str]) -> int:
    """Return 0, or 1 with one line on standard error."""
    parser = child_parser("insitu_bridges.server", __doc__, socket=Path, config=Path)

    def run(args: argparse.Namespace) -> None:
        asyncio.run(_main(args.socket, name_run(load_config(args.config))))

    return main_of_child(parser, run, argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
