"""`whet serve` with engine.kind = upstream: a provider answers, whet keeps the text. Caller: run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from whet.config import Config
from whet.engine.open import secret_from_environment
from whet.gateway.passthrough import BlackBoxSession, Spent, UpstreamOptions
from whet.gateway.text_record import TextCall
from whet.gateway.usage import Prices


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
        max_cost=table.max_cost,
        prices=Prices(input=table.input_price, cached=table.cached_price, output=table.output_price),
    )


def told_of_call(rollout_id: str, call: TextCall) -> tuple[dict[str, Any], str]:
    """One call for machines and for people, without its text."""
    told = {
        "rollout_id": rollout_id,
        "turn": call.turn,
        "path": call.path,
        "status": call.status,
        "complete": call.complete,
        **asdict(call.usage),
        "cost": call.cost,
        "ms": call.ms,
    }
    end = "" if call.complete else ", cut off"
    line = (
        f"{rollout_id} #{call.turn} {call.path} prompt {call.usage.prompt_tokens:>6} "
        f"sampled {call.usage.sampled_tokens:>4} | HTTP {call.status}{end}, cost {call.cost:.4g} "
        f"| {call.ms:.0f} ms"
    )
    return told, line


def told_of_session(session: BlackBoxSession) -> tuple[dict[str, Any], str]:
    """What one sealed session used."""
    spent: Spent = session.spent
    told = {"rollout_id": session.rollout_id, **asdict(spent), "file": str(session.record.path)}
    line = (
        f"{session.rollout_id}: {spent.calls} calls, prompt {spent.prompt_tokens}, "
        f"sampled {spent.sampled_tokens}, cost {spent.cost:.4g}; text only, never trainable"
    )
    return told, line


def records_folder(run: Path) -> Path:
    return run / "sessions"
