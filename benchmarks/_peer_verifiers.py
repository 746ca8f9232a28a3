"""The interception server of verifiers with its training client, driven by lines of JSON; runs in the
environment of `verifiers`, without insitu.

`python _peer_verifiers.py ENGINE_URL MODEL_FOLDER`. Caller: bench/_peers.
"""

import asyncio
import json
import sys

from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


async def main(engine: str, model: str) -> None:
    """Serve until the end of stdin; each line asks for so many sessions."""
    client = TrainClientConfig(
        base_url=f"{engine}/v1", api_key_var="NO_KEY", renderer={"name": "qwen3"}, renderer_model_name=model
    )
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with InterceptionServer() as server:
        print(json.dumps({"port": server.port}), flush=True)
        while line := await lines.readline():
            reported = []
            for _ in range(json.loads(line)["open"]):
                trace = Trace(
                    task=TraceTask(type="Task", data=TaskData(prompt="Fix it.")), agent=AgentInfo(config={})
                )
                session = RolloutSession(ctx=ModelContext(model="m", client=client), trace=trace)
                reported.append({"path": "/v1/chat/completions", "secret": server.register(session)[0]})
            print(json.dumps({"port": server.port, "sessions": reported}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
