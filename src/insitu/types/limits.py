"""Limits of a rollout: the keys of [limits], and with the context of the model the limits of a session."""

from __future__ import annotations

from insitu.types.keys import Count, CountOrZero, Keys, Seconds


class LimitKeys(Keys):
    """Limits of one rollout; a rollout that reaches one is graded, not retried."""

    wall_s: Seconds = 120.0
    """Seconds from the agent's start to its forced stop, without engine downtime."""
    max_calls: Count = 8
    """Model calls per rollout."""
    max_call_tokens: Count = 96
    """Sampled tokens per model call."""
    max_session_tokens: Count = 65536
    """Sampled tokens per rollout."""
    max_prompt_tokens: CountOrZero = 0
    """Prompt tokens per rollout, summed over its calls; 0 = no limit."""

    def over(self, limits: Limits) -> Limits:
        """Return `limits` with the values that were set here."""
        return limits.changed(**{key: getattr(self, key) for key in self.model_fields_set})


class Limits(LimitKeys):
    """Limits of one session."""

    max_context_tokens: Count = 4096
    """Prompt plus sampled tokens of one call."""
    max_nodes: Count = 1024
    """Nodes of a rollout's forest; a call adds two at most."""
