"""The provider of engine.kind = upstream and the operator's limits on it."""

from __future__ import annotations

from pydantic import Field

from insitu.config.engines import ProviderKeys
from insitu.gateway.provider_usage import Prices


class ProviderOptions(ProviderKeys):
    """Provider and limits over all sessions.

    `url` ends before the path of a request (/v1/messages and the like). `max_cost` is checked before a call,
    so running calls may exceed it.
    """

    key: str = Field(default="", repr=False)
    call_deadline_s: float = 600.0
    connect_deadline_s: float = 10.0
    prices: Prices = Prices()
