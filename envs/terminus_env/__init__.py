"""A terminal as an OpenEnv environment, graded in a clean sandbox."""

from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction

from .client import TerminusEnv

__all__ = ["CallToolAction", "ListToolsAction", "TerminusEnv"]
