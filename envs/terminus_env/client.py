"""Client of terminus_env."""

from typing import Any

from openenv.core.env_server.types import State
from openenv.core.mcp_client import MCPToolClient

GRADING_S = 3600.0
"""Longest wait for a reply: the last step grades."""


class TerminusEnv(MCPToolClient):
    """`reset(task=ID)` or `reset(setup=[...], verify=[...])`, then `call_tool("terminal", command=...)`.

    The step with `final_answer` ends the episode and has its reward. Use `.sync()` without an event loop.
    """

    def __init__(self, base_url: str, message_timeout_s: float = GRADING_S, **options: Any) -> None:
        """Connect to a server at `base_url`."""
        super().__init__(base_url, message_timeout_s=message_timeout_s, **options)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        # OpenEnv's own keeps only episode_id and step_count.
        return State.model_validate(payload)
