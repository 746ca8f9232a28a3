"""An agent loop of verl (V1): agents in sandboxes, tokens from verl's own servers.

    verl --run(task)--> SourceThread --> agents --> gateway --> engine "external"
         <--outputs---                                               |
    server_manager.generate <---------------- take, deliver ---------+

verl names the class in `agent_loop_config_path` and makes one for each rollout; all of a process share one
source. `INSITU_CONFIG` names the configuration, whose engine is `kind = "external"`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp

from insitu.config import Config
from insitu.errors import ConfigError, EngineError, user_code
from insitu_bridges.process import read_named
from insitu_bridges.rows import rows_alone
from insitu_bridges.thread import SourceThread
from insitu_bridges.to_verl import output_of
from insitu_bridges.versions import Need, check
from insitu_train.plan.step import PlanConfig

KEY = "INSITU_VERL_KEY"
"""Variable with the secret of the connection, made here."""
TAKEN = 64
WAIT_S, RETRY_S = 20.0, 0.2
OUTPUT = Need(
    ("verl.experimental.agent_loop.agent_loop:AgentLoopOutput",),
    (
        "prompt_ids", "response_ids", "response_mask", "response_logprobs", "routed_experts", "reward_score",
        "num_turns", "metrics", "extra_fields",
    ),
    complete=True,
)  # fmt: skip


class AgentLoop:
    """One rollout of a task; implements what verl calls of its `AgentLoopBase`."""

    def __init__(self, server_manager: Any, trainer_config: Any = None, **unused: Any) -> None:
        """Take verl's client of its servers and its configuration; nothing else is used."""
        self._servers = server_manager
        given = None if trainer_config is None else trainer_config.config.algorithm
        self._estimator = "grpo" if given is None else str(given.adv_estimator)

    async def run(self, sampling_params: Mapping[str, Any], **sample: Any) -> list[Any]:
        """Return an output per row, the last one last; none for a rollout without a reward, as V1 skips it.

        The task is `extra_info["task_id"]` of the sample, or the text of its prompt. Raises ConfigError, and
        what ended the source.
        """
        source, config = await _shared(self._servers)
        if sampling_params.get("temperature", 1.0) != config.engine.temperature:
            raise ConfigError(
                f"verl samples at temperature {sampling_params['temperature']}, engine.temperature is"
                f" {config.engine.temperature}: evaluations need an agent loop of their own"
            )
        if self._estimator != "grpo" and config.train.rows == "all":
            raise ConfigError(
                f"verl's {self._estimator} counts a rollout once for each of its rows: take"
                ' algorithm.adv_estimator=grpo, or train.rows = "final", which is one row'
            )
        task, key = _task(sample), next(_keys)
        rollout = await asyncio.wrap_future(source.submit(lambda child: child.run(task, key)))
        if rollout.reward is None:
            return []
        item = rows_alone(rollout, PlanConfig.of(config))
        made = OUTPUT.get()
        return [made(**output_of(item, segment)) for segment in item.given]


_keys = itertools.count()


def _task(sample: Mapping[str, Any]) -> str:
    prompt = sample.get("raw_prompt")
    text = prompt[-1]["content"] if isinstance(prompt, list) and prompt else prompt
    task = (sample.get("extra_info") or {}).get("task_id") or text
    if not isinstance(task, str):
        raise ConfigError("verl: a sample needs the id of a task, in extra_info or as its prompt")
    return task


def check_output() -> None:
    """Raise ConfigError for a verl whose outputs have other fields."""
    check("verl", OUTPUT)


@functools.cache
def _starting(servers: Any) -> asyncio.Task[tuple[SourceThread, Config, asyncio.Task[None]]]:
    return asyncio.ensure_future(_start(servers))


async def _shared(servers: Any) -> tuple[SourceThread, Config]:
    """Return the source of this process, started at the first rollout; its child ends with the process."""
    source, config, answering = await asyncio.shield(_starting(servers))
    if answering.done():
        answering.result()
    return source, config


async def _start(servers: Any) -> tuple[SourceThread, Config, asyncio.Task[None]]:
    check_output()
    config = read_named()
    if config.engine.kind != "external":
        raise ConfigError("verl: engine.kind must be external, since verl's own servers sample")
    os.environ.setdefault(KEY, secrets.token_hex(16))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    engine = config.engine.model_copy(update={"listen": address, "key_env": KEY})
    # verl has several such processes on a node, and nodes may share the folder
    own = f"{config.run.dir}-{socket.gethostname()}-{os.getpid()}" if config.run.dir else ""
    run = config.run.model_copy(update={"dir": own})
    config = config.model_copy(update={"engine": engine, "run": run})
    # Opening the source samples a probe, so requests are answered from the start.
    answering = asyncio.ensure_future(_answer_all(servers, f"http://{address}/v1"))
    try:
        return await asyncio.to_thread(SourceThread, config), config, answering
    except BaseException:
        answering.cancel()
        raise


async def _answer_all(servers: Any, url: str) -> None:
    """Answer the requests of the source's engine by verl's servers, until the process ends."""
    headers = {"Authorization": f"Bearer {os.environ[KEY]}"}
    async with aiohttp.ClientSession(headers=headers) as http, asyncio.TaskGroup() as tasks:
        while True:
            try:
                taken = await _post(http, f"{url}/take", {"limit": TAKEN, "wait_s": WAIT_S})
            except aiohttp.ClientError:  # not listening yet, or the child has ended: `run` raises why
                await asyncio.sleep(RETRY_S)
                continue
            for request in taken["requests"]:
                tasks.create_task(_answer(servers, http, url, request))


async def _answer(servers: Any, http: aiohttp.ClientSession, url: str, request: Mapping[str, Any]) -> None:
    parameters = {
        "temperature": request["temperature"],
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "max_tokens": request["max_tokens"],
        "stop_token_ids": request["stop_ids"],
    }
    try:
        # The rollout's id keeps its calls at the server that has their prefix.
        with user_code(EngineError, "verl's server"):
            made = await servers.generate(
                request["rollout_id"], prompt_ids=request["ids"], sampling_params=parameters
            )
        if made.stop_reason == "aborted" or not made.token_ids:
            raise EngineError("verl's server aborted the request")
    except EngineError as error:
        await _post(http, f"{url}/fail", {"name": request["name"], "why": str(error)})
        return
    # Where weights changed within a reply its tokens are labelled with the older version.
    version = int(made.extra_fields.get("min_global_steps") or 0)
    await _post(http, f"{url}/publish", {"version": int(made.extra_fields.get("max_global_steps") or 0)})
    ids = list(made.token_ids)
    answer = {
        "name": request["name"],
        "ids": ids,
        "logprobs": made.log_probs,
        "finish": "stop" if ids[-1] in request["stop_ids"] else "length",
        "version_runs": [[0, version]],
    }
    await _post(http, f"{url}/deliver", answer)


async def _post(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Any:
    """Return the reply. A refused answer has an error in it, which the request reports if it still waits."""
    async with http.post(url, json=body) as reply:
        return await reply.json()
