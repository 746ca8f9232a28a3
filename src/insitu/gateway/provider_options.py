"""The provider of engine.kind = upstream and the operator's limits on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from insitu.gateway.provider_usage import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """Provider and limits over all sessions."""

    url: str
    """Base URL up to the version, e.g. https://api.example.com: /v1/messages and the like are added."""
    model: str
    """The only model that may be requested: another one's prices could exceed any cost limit."""
    key: str = field(default="", repr=False)
    call_deadline_s: float = 600.0
    connect_deadline_s: float = 10.0
    requests_per_minute: int = 0
    """0 = no limit."""
    max_concurrent: int = 16
    max_wait_s: float = 0.0
    """Longest wait of one call for the rate limits and for retries while the provider is busy; 0 = none."""
    max_cost: float = 0.0
    """In the unit of the prices; 0 = no limit. Checked before a call, so running calls may exceed it."""
    prices: Prices = field(default_factory=Prices)
