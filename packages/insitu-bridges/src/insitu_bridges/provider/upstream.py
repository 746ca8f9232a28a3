"""The provider of engine.kind = upstream, from the configuration.

A rollout with a provider has no tokens, so it cannot be trained; it is graded like any other. If the provider
does not answer (rate limits, an outage, a rejected key, the cost limit), the attempt is unscorable, not a
zero.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from insitu.config import Config
from insitu.engines.factory import secret_from_environment
from insitu.gateway.text_log import spent_in
from insitu_bridges.provider.backend import ProviderBackend, check_reachable, open_provider
from insitu_bridges.provider.limits import ProviderOptions
from insitu_bridges.provider.usage import Prices


def upstream_options(config: Config) -> ProviderOptions:
    """Return the provider's options; raise ConfigError if the key is not in the environment."""
    table = config.engine
    return table.pick(
        ProviderOptions,
        url=table.url,
        key=secret_from_environment(table.key_env),
        call_deadline_s=table.call_timeout_s,
        prices=Prices(**table.prices),
    )


@asynccontextmanager
async def open_upstream(config: Config, records: Path) -> AsyncIterator[ProviderBackend]:
    """Open the configured provider; earlier costs of this run count towards the cost limit.

    Raises ConfigError, RecordError, EngineUnavailable.
    """
    options = upstream_options(config)
    await check_reachable(options.url, options.connect_deadline_s)
    async with open_provider(options, records) as provider:
        provider.spent = spent_in(records)
        yield provider
