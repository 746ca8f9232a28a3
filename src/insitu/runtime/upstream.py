"""Rollouts with a provider: calls of sandboxed agents are proxied and recorded as text.

    sandbox -> unix socket -> UpstreamGateway -> ProviderProxy -> provider

Such a rollout has no tokens, so it cannot be trained; it is graded like any other. If the provider does not
answer (rate limits, an outage, a rejected key, the cost limit), the attempt is unscorable, not a zero.
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
    """Return the proxy options; raise ConfigError if the key is not in the environment."""
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
    """Implements `rollout.AttemptSession` over a provider's session."""

    def __init__(self, inner: ProviderSession) -> None:
        self._inner = inner
        self.public_id, self.secret = inner.public_id, inner.secret

    @property
    def left(self) -> bool:
        return self._inner.left

    @property
    def stats(self) -> SessionStats:
        inner = self._inner
        return SessionStats(
            calls=inner.spent.calls,
            sampled_tokens=inner.spent.sampled_tokens,
            prompt_tokens=inner.spent.prompt_tokens,
            budget_stop=inner.budget_stop,
            infra_error=inner.trouble,
            waited_s=inner.waited_s,
            rejections=inner.rejections,
        )

    @property
    def host_calls(self) -> Sequence[HostCall]:
        """Always empty: request bodies are passed on unchanged."""
        return ()

    async def seal(self, deadline_s: float) -> Trajectory:
        return await self._inner.seal(deadline_s)


class UpstreamGateway:
    """Implements `rollout.Sessions` and listens for sandboxes."""

    def __init__(self, proxy: ProviderProxy, records: Path, max_cost: float = 0.0) -> None:
        self._proxy, self._records, self._max_cost = proxy, records, max_cost

    async def check(self) -> None:
        """Raise GatewayError at the cost limit, EngineUnavailable during an outage of the provider."""
        if self._proxy.cost_reached:
            raise GatewayError(f"the cost limit is reached (engine.max_cost {self._max_cost:g})")
        self._proxy.outage.check()

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
        """Open a session; seed, temperature and call limit have no effect on the provider."""
        budgets = Budgets(
            max_calls=limits.max_calls,
            max_sampled_tokens=limits.max_session_tokens,
            max_prompt_tokens=limits.max_prompt_tokens,
        )
        name = free_name(self._records, rollout_id)
        return UpstreamSession(
            self._proxy.open_session(rollout_id, budgets=budgets, listener=listener, name=name)
        )

    def listen_unix(self, path: Path) -> AbstractAsyncContextManager[Listener]:
        return self._proxy.listen_unix(path)

    def listen_tcp(self, host: str = "127.0.0.1", port: int = 0) -> AbstractAsyncContextManager[Listener]:
        return self._proxy.listen_tcp(host, port)


def free_name(records: Path, rollout_id: str) -> str:
    """Return an unused record name: each attempt has its own record, the highest number is the last."""
    base, number = record_name(rollout_id), 1
    while (records / f"{base}.{number}.jsonl").exists():
        number += 1
    return f"{base}.{number}"


@asynccontextmanager
async def open_upstream(
    config: Config, records: Path, say: Callable[[str], None]
) -> AsyncIterator[UpstreamGateway]:
    """Open the configured provider; earlier costs of this run count towards the cost limit.

    Raises ConfigError, RecordError, EngineUnavailable.
    """
    options = upstream_options(config)
    await check_reachable(options.url, options.connect_deadline_s)
    async with open_proxy(options, records, say=say) as proxy:
        for call in read_calls(records):
            proxy.spent.add(call.usage, call.cost)
        yield UpstreamGateway(proxy, records, config.engine.max_cost)


async def check_reachable(url: str, deadline_s: float) -> None:
    """Connect once and send nothing, to find a wrong address before any sandbox starts.

    Raises EngineUnavailable.
    """
    address = urlsplit(url)
    secure = address.scheme == "https"
    try:
        async with asyncio.timeout(deadline_s):
            _, writer = await asyncio.open_connection(
                address.hostname, address.port or (443 if secure else 80), ssl=secure or None
            )
    except (OSError, TimeoutError) as error:
        why = f"timeout after {deadline_s:g} s" if isinstance(error, TimeoutError) else reason_of(error)
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
    """Yield every recorded model call of a run, failed attempts included; skip truncated lines.

    Raises RecordError.
    """
    for file in sorted(records.glob("*.jsonl")):
        with boundary(RecordError, f"read {file}"), file.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    continue
                entry = orjson.loads(line)
                route = take_apart(f"/v1/{entry['path']}")
                if route is None or route.kind != "call":
                    continue
                yield ReadCall(
                    rollout_id=entry["rollout_id"],
                    usage=Usage(**entry["usage"]),
                    cost=entry["cost"],
                    status=entry["status"],
                )


def spent_in(records: Path) -> Spent:
    """Return the sum over a run's records."""
    spent = Spent()
    for call in read_calls(records):
        spent.add(call.usage, call.cost)
    return spent
