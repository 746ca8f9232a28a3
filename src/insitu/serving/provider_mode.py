"""Events of `insitu serve` with engine.kind = upstream, where a provider answers and text is logged."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from insitu.gateway.provider_session import ProviderSession, Spent
from insitu.gateway.text_log import TextCall


def describe_call(rollout_id: str, call: TextCall) -> tuple[dict[str, Any], str]:
    """Return one call, without its text, as JSON fields and as a line."""
    fields = {
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
    return fields, line


def describe_session(session: ProviderSession) -> tuple[dict[str, Any], str]:
    """Return the usage of a sealed session as JSON fields and as a line."""
    spent: Spent = session.spent
    fields = {"rollout_id": session.rollout_id, **asdict(spent), "file": str(session.record.path)}
    line = (
        f"{session.rollout_id}: {spent.calls} calls, prompt {spent.prompt_tokens}, "
        f"sampled {spent.sampled_tokens}, cost {spent.cost:.4g}; text only, never trainable"
    )
    return fields, line


def records_folder(run: Path) -> Path:
    return run / "sessions"
