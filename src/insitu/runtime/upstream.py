"""Rollouts before a provider: agents in sandboxes as ever, but their calls are passed on and kept as text.

    sandbox -> unix socket -> UpstreamGateway -> ProviderProxy -> provider

A rollout of it holds no token, so nothing of it can be trained; it is graded like any other. What keeps the
provider from answering (rate limits past all patience, an outage, a refused key, the operator's own cost
limit) is nothing the agent did: the attempt is unscorable, not a zero. Callers: evaluate, serve.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from insitu.config import Config
from insitu.engines.factory import secret_from_environment
from insitu.errors import EngineUnavailable, GatewayError, RecordError, boundary
from insitu.gateway.host_tools import HostCall
from insitu.gateway.listeners import Listener
from insitu.gateway.provider_session import Budgets, ProviderSession, Spent, UpstreamOptions, record_name
from insitu.gateway.provider_usage import Prices, Usage
from insitu.gateway.proxy import ProviderProxy, open_proxy, reason_of
from insitu.gateway.routes import take_apart
from insitu.gateway.session_spec import SessionStats
from insitu.types import Limits, Trajectory


def upstream_options(config: Config) -> UpstreamOptions:
    """Raises ConfigError when the key is not in the environment."""
    table = config.engine
    return UpstreamOptions(
        url=table.url,
        model=table.model,
        key=secret_from_environment(table.key_env),
        call_deadline_s=table.call_timeout_s,
        requests_per_minute=table.requests_per_minute,
        max_concurrent=table.max_concurrent,
        max_wait_s=table.max_wait_s,
        max_cost=table.max_cost,
        prices=Prices(
            input=table.input_price,
            cached=table.cached_price,
            written=table.cache_write_price,
            output=table.output_price,
        ),
    )


class UpstreamSession:
    """Implements rollout.AttemptSession."""

    def __init__(self, inner: ProviderSession) -> None:
        self._inner = inner
        self.public_id, self.secret = inner.public_id, inner.secret

    @property
    def left(self) -> bool:
        return self._inner.left

    @property
    def stats(self) -> SessionStats:
        held = self._inner
        return SessionStats(
            calls=held.spent.calls,
            sampled_tokens=held.spent.sampled_tokens,
            prompt_tokens=held.spent.prompt_tokens,
            budget_stop=held.budget_stop,
            infra_error=held.trouble,
            waited_s=held.waited_s,
            rejections=held.rejections,
        )

    @property
    def host_calls(self) -> Sequence[HostCall]:
        """None: bodies go on as they are."""
        return ()

    async def seal(self, deadline_s: float) -> Trajectory:
        return await self._inner.seal(deadline_s)


class UpstreamGateway:
    """Implements rollout.Sessions and listens for sandboxes."""

    def __init__(self, through: ProviderProxy, records: Path, max_cost: float = 0.0) -> None:
        self._through, self._records, self._max_cost = through, records, max_cost

    async def check(self) -> None:
        """Raises GatewayError at the cost limit, EngineUnavailable when the provider is away."""
        if self._through.cost_reached:
            raise GatewayError(f"the cost limit is reached (engine.max_cost {self._max_cost:g})")
        self._through.outage.check()

    def open_session(
        self,
        rollout_id: str,
        *,
        seed: int,
        limits: Limits,
        temperature: float,
        max_call_tokens: int,
        listener: Path,
    ) -> UpstreamSession:
        """No seed, temperature or call limit goes to the provider: bodies go on as the agent wrote them."""
        budgets = Budgets(
            max_calls=limits.max_calls,
            max_sampled_tokens=limits.max_session_tokens,
            max_prompt_tokens=limits.max_prompt_tokens,
        )
        name = free_name(self._records, rollout_id)
        return UpstreamSession(
            self._through.open_session(rollout_id, budgets=budgets, listener=listener, name=name)
        )

    def listen_unix(self, path: Path) -> AbstractAsyncContextManager[Listener]:
        return self._through.listen_unix(path)

    def listen_tcp(self, host: str = "127.0.0.1", port: int = 0) -> AbstractAsyncContextManager[Listener]:
        return self._through.listen_tcp(host, port)


def free_name(records: Path, rollout_id: str) -> str:
    """Every try at a rollout has a record of its own; the highest number is the last try."""
    base, number = record_name(rollout_id), 1
    while (records / f"{base}.{number}.jsonl").exists():
        number += 1
    return f"{base}.{number}"


@asynccontextmanager
async def open_upstream(
    config: Config, records: Path, say: Callable[[str], None]
) -> AsyncIterator[UpstreamGateway]:
    """The provider of the configuration, which can be connected to. What earlier processes of this run spent
    counts towards the cost limit. Raises ConfigError, RecordError, EngineUnavailable."""
    options = upstream_options(config)
    await check_reachable(options.url, options.connect_deadline_s)
    async with open_proxy(options, records, say=say) as through:
        for call in read_calls(records):
            through.spent.add(call.usage, call.cost)
        yield UpstreamGateway(through, records, config.engine.max_cost)


async def check_reachable(url: str, deadline_s: float) -> None:
    """Connect once and send nothing, so that a wrong address is found before any sandbox boots. Raises
    EngineUnavailable."""
    address = urlsplit(url)
    secure = address.scheme == "https"
    try:
        async with asyncio.timeout(deadline_s):
            _, writer = await asyncio.open_connection(
                address.hostname, address.port or (443 if secure else 80), ssl=secure or None
            )
    except (OSError, TimeoutError) as error:
        why = f"no answer in {deadline_s:g} s" if isinstance(error, TimeoutError) else reason_of(error)
        raise EngineUnavailable(f"engine.url: the provider at {url} cannot be reached: {why}") from error
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCall:
    """One line of a record, without its text."""

    rollout_id: str
    usage: Usage
    cost: float
    status: int


def read_calls(records: Path) -> Iterator[ReadCall]:
    """Every recorded model call of a run, failed tries included. A line that a kill cut short is left out.
    Raises RecordError."""
    for file in sorted(records.glob("*.jsonl")):
        with boundary(RecordError, f"read {file}"), file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    continue
                held = orjson.loads(line)
                route = take_apart(f"/v1/{held['path']}")
                if route is None or route.kind != "call":
                    continue
                yield ReadCall(
                    rollout_id=held["rollout_id"],
                    usage=Usage(**held["usage"]),
                    cost=held["cost"],
                    status=held["status"],
                )


def spent_in(records: Path) -> Spent:
    """Sum over a run's records."""
    spent = Spent()
    for call in read_calls(records):
        spent.add(call.usage, call.cost)
    return spent
