"""Open the configured engine, and probe what is a server or an external trainer.

    async with open_engine(config, renderer) as engine: ...

A training run takes its learner's engine from the learner that it has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from insitu.concurrency import run_all
from insitu.config import Config, model_folder
from insitu.engines.base import Engine, LoadingEngine
from insitu.engines.guarded import GuardedEngine
from insitu.engines.http import HttpOptions, checked_url
from insitu.engines.launch import launched
from insitu.engines.probe import probe_engine
from insitu.engines.replicas import EngineSet, may_come_back
from insitu.engines.served_model import check_served
from insitu.engines.server_command import SERVERS
from insitu.errors import ConfigError, EngineError, EngineUnavailable, user_code
from insitu.registry import find
from insitu.types import IntArray, Message, ToolSpec

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two connection attempts to a server that is not up yet."""


class ProbeRenderer(Protocol):
    """The part of `chat.renderer.ChatRenderer` that the probe needs."""

    @property
    def vocab_size(self) -> int: ...

    def open(self, system: Sequence[Message], tools: Sequence[ToolSpec]) -> IntArray: ...

    def append(self, messages: Sequence[Message]) -> IntArray: ...

    def generation_prompt(self) -> IntArray: ...


class LocalEngine(Protocol):
    """An engine that a run starts in a process of its own, by its name in the registry."""

    def check(self, config: Config) -> None:
        """Raise ConfigError where it could not start."""

    def open(
        self, config: Config, log: Path | None
    ) -> AbstractAsyncContextManager[tuple[LoadingEngine, Callable[[], Awaitable[None]]]]:
        """Start it; the second value raises when it cannot answer any more."""


def local_engine(config: Config) -> LocalEngine:
    """Return the configured engine of a run with `engine.in_learner`; raise ConfigError."""
    engine: LocalEngine = find("engines", config.engine.kind)
    return engine


def http_options(config: Config, launched: Sequence[str] = ()) -> list[HttpOptions]:
    """Return the connection options of the configured or launched servers; raise ConfigError if invalid."""
    table = config.engine
    urls = [checked_url(url, "engine.urls") for url in launched or table.urls]
    if twice := next((url for url in urls if urls.count(url) > 1), ""):
        raise ConfigError(f"engine.urls names {twice} twice")
    key = secret_from_environment(table.key_env)
    return [
        HttpOptions(
            url=url,
            key=key,
            call_deadline_s=table.call_timeout_s,
            context_versions=config.collect.max_staleness if table.publish_mode == "keep" else 0,
            experts=table.replay_experts,
        )
        for url in urls
    ]


def secret_from_environment(name: str) -> str:
    """Return the key in variable `name`, empty for an empty name; raise ConfigError if it is not set."""
    if not name:
        return ""
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(f"engine.key_env: the environment variable {name} is not set")
    return value


def probe_prompt(renderer: ProbeRenderer) -> IntArray:
    """Return a short conversation up to the generation prompt."""
    message = Message(role="user", text="Write a few words about anything you like.")
    parts = [renderer.open((), ()), renderer.append((message,)), renderer.generation_prompt()]
    return np.concatenate(parts).astype(np.int32)


@asynccontextmanager
async def open_engine(
    config: Config,
    renderer: ProbeRenderer,
    *,
    probe: bool = True,
    announce: Callable[[str], None] = log.warning,
    output: Path | None = None,
) -> AsyncIterator[Engine]:
    """Attach to the configured engine and probe it at `engine.temperature`.

    `announce` gets a line for the operator before the engine can answer: where the trainer of an external
    engine must connect, or which server is awaited; `output` is the file for what a learner prints. Raises
    ConfigError for kinds that are not opened here, EngineError when the probe fails, EngineUnavailable when
    the engine does not come up.
    """
    if config.engine.in_learner or config.engine.kind in SERVERS:
        async with open_server(config, renderer, announce, probe=probe, output=output) as engines:
            engines.check_same_weights()
            yield engines
        return
    async with _attach(config, announce) as engine:
        scripted = engine.info.kind == "demonstrated"  # has no logprobs, and no run trains by them
        await _check_engine(engine, config, renderer, probe=probe and not scripted)
        yield engine


@asynccontextmanager
async def open_server(
    config: Config,
    renderer: ProbeRenderer,
    announce: Callable[[str], None] = log.warning,
    *,
    probe: bool = True,
    output: Path | None = None,
) -> AsyncIterator[EngineSet]:
    """Attach to the servers that take weights (vllm, sglang, an own one) and probe each; or start a learner.

    Raises ConfigError for other kinds, EngineError when they are not alike.
    """
    table = config.engine
    async with AsyncExitStack() as stack:
        check: Callable[[], Awaitable[None]] = may_come_back
        if table.in_learner:
            opened = local_engine(config).open(config, output)  # probes itself
            engine, check = await stack.enter_async_context(opened)
            servers: Mapping[str, LoadingEngine] = {table.kind: engine}
        else:
            servers = await _attach_servers(stack, config, announce)
            await run_all(*(_check_server(*one, config, renderer, probe=probe) for one in servers.items()))
            _check_alike(servers)
        engines = EngineSet(
            servers,
            max_wait_s=table.start_timeout_s,
            restarts=config.train.restarts,
            share_gpu=table.share_gpu,
            say=announce,
            check=check,
        )
        yield await stack.enter_async_context(engines)


async def _check_server(
    url: str, engine: LoadingEngine, config: Config, renderer: ProbeRenderer, *, probe: bool
) -> None:
    """Raise EngineError, naming the server, if it is not the model's or the probe fails."""
    try:
        if config.engine.kind in SERVERS:
            (options,) = http_options(config, [url])
            folder, adapters = model_folder(config), config.publishes_adapters
            await check_served(options, config.engine.kind, folder, adapters=adapters)
        await _check_engine(engine, config, renderer, probe=probe)
    except EngineError as error:
        raise (error if url in str(error) else type(error)(f"{url}: {error}")) from error


def _check_alike(servers: Mapping[str, LoadingEngine]) -> None:
    """Raise EngineError for servers that differ in model, context or how they report versions.

    Those that name the same version must hold the same weights; others get theirs by the first publication.
    """
    (first, engine), *others = servers.items()
    for name, other in others:
        if other.info != engine.info:
            raise EngineError(f"{name} and {first} are not alike: {_described(other)}, {_described(engine)}")
        held, seen = engine.receipt, other.receipt
        if held.version == seen.version and held.checksum != seen.checksum:
            raise EngineError(
                f"{name} and {first} hold different weights as version {held.version}"
                f" ({seen.checksum[:12]}, {held.checksum[:12]}): start both on the same model"
            )


def _described(engine: Engine) -> str:
    info = engine.info
    return f"{info.model} with {info.max_context_tokens} tokens of context and a version per {info.versions}"


async def _check_engine(engine: Engine, config: Config, renderer: ProbeRenderer, *, probe: bool) -> None:
    """Raise EngineError if the engine's context is too small or the probe fails."""
    if engine.info.max_context_tokens < config.model.max_context_tokens:
        raise EngineError(
            f"{engine.info.name} takes {engine.info.max_context_tokens} tokens per call, "
            f"model.max_context_tokens asks for {config.model.max_context_tokens}"
        )
    if probe:
        report = await probe_engine(
            engine,
            probe_prompt(renderer),
            vocab_size=renderer.vocab_size,
            temperature=config.engine.temperature,
            deadline_s=config.engine.call_timeout_s,
            few=config.engine.kind == "external",
        )
        log.info(
            "engine probed name=%s version=%d gap=%.2g",
            engine.info.name,
            report.version,
            report.largest_gap,
        )


@asynccontextmanager
async def _attach(config: Config, announce: Callable[[str], None]) -> AsyncIterator[Engine]:
    if config.engine.kind == "external":
        async with find("engines", "external")(config, announce) as external:
            yield external
    elif config.engine.kind in _NOT_OPENED:
        raise ConfigError(f"engine.kind {config.engine.kind}: {_NOT_OPENED[config.engine.kind]}")
    else:
        async with AsyncExitStack() as stack:
            own = await _enter(stack, config.engine.kind, config, Engine)
            yield GuardedEngine(own, config.engine.kind)


async def _attach_servers(
    stack: AsyncExitStack, config: Config, announce: Callable[[str], None]
) -> Mapping[str, LoadingEngine]:
    """Attach to the servers, by address, waiting up to `engine.start_timeout_s` for them to come up."""
    kind = config.engine.kind
    if kind in (*_NOT_OPENED, "external"):
        raise ConfigError(f"engine.kind {kind} cannot load weights from the insitu trainer")
    ends = time.monotonic() + config.engine.start_timeout_s
    if kind not in SERVERS:
        engine = await _attach_in_time(stack, config, config, "", ends, announce)
        return {kind: cast("LoadingEngine", GuardedEngine(engine, kind))}
    urls = await stack.enter_async_context(launched(config, announce)) if config.engine.launch else ()
    return {
        options.url: await _attach_in_time(stack, config, options, options.url, ends, announce)
        for options in http_options(config, urls)
    }


async def _attach_in_time(
    stack: AsyncExitStack,
    config: Config,
    options: object,
    url: str,
    ends: float,
    announce: Callable[[str], None],
) -> LoadingEngine:
    kind, most_s = config.engine.kind, config.engine.start_timeout_s
    announced = False
    while True:
        try:
            engine: LoadingEngine = await _enter(stack, kind, options, LoadingEngine)
            return engine
        except EngineUnavailable as error:
            if time.monotonic() >= ends:
                late = f"; waited {most_s:g} s for it (engine.start_timeout_s)" if most_s else ""
                todo = "start it, or leave it out of engine.urls" if url else "start it"
                raise EngineUnavailable(f"{error}{late}: {todo}") from error
            if not announced:
                announce(f"waiting for {kind} at {url or config.engine.url} ({most_s:g} s): {error}")
                announced = True
        await asyncio.sleep(min(POLL_S, max(0.0, ends - time.monotonic())))


async def _enter(stack: AsyncExitStack, kind: str, options: object, wanted: Any) -> Any:
    """Open an engine until the stack ends; raise EngineError for what its code raises.

    Raises ConfigError for one that has not all names of the protocol `wanted`.
    """
    with user_code(EngineError, f"engine.kind {kind}"):
        opened = await stack.enter_async_context(find("engines", kind)(options))
    if lacks := [name for name in dir(wanted) if name[0] != "_" and not hasattr(opened, name)]:
        raise ConfigError(f"engine.kind {kind} opened no {wanted.__name__}: it lacks {', '.join(lacks)}")
    return opened


_NOT_OPENED = {
    "upstream": "it takes no token ids, so nothing is sampled from it; `insitu serve` passes requests on",
}
