"""The table [gateway]: the server that agents use as their provider."""

from __future__ import annotations

from typing import Annotated, Literal

from insitu.config.base import Address, Table, ToolsOrHook, split_address, unless

_SHIM = unless("shim_tool", "")


class GatewayTable(Table):
    """The server that agents use as their provider."""

    listen: Address = ""
    """Address that serves all sessions too, by their secrets: HOST:PORT, or the port alone, 0 a free one, of
    127.0.0.1; 0.0.0.0 = reachable from other machines, behind a proxy with TLS; empty = none."""
    public_url: Annotated[str, unless("listen", "")] = ""
    """URL at which `listen` is reached from elsewhere, https by a proxy: agents in sandboxes of clouds call
    it. It is probed before the first rollout. Or the command of a tunnel to {origin} that prints its https
    URL: "cloudflared tunnel --url {origin}". Empty = the Space in SPACE_HOST or SPACE_ID."""
    auxiliary: Literal["exclude", "train"] = "exclude"
    """Side calls (titles, summaries without tools, commit messages): exclude = not trained; train = trained
    like a sub-agent's."""
    tools: ToolsOrHook = ""
    """JSON file with host tools, a list of {name, description, parameters, ends}: offered to the model in
    every session beside the agent's own tools, checked, acknowledged and recorded; with `ends` the first
    accepted call ends the rollout. Or a function that sees each tool call and result and may block, rewrite
    or remind, as NAME, module:attribute or file.py:attribute; its attribute `tools` is such a list. Empty =
    none."""
    shim_tool: str = ""
    """For a model that cannot call tools: TOOL or TOOL:ARGUMENT of the agent that runs a command. A reply
    with a command as text (JSON, fenced shell block, Python call) becomes a call of it; empty = off."""
    shim_whole_text: Annotated[bool, _SHIM] = False
    """Take a reply in any other form as a command as a whole."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`; a free port of this machine without it."""
        return split_address(self.listen or "0")

    @property
    def tunnel(self) -> str:
        """The command of a tunnel, if the public URL comes from one."""
        return self.public_url if "{origin}" in self.public_url else ""

    @property
    def adds(self) -> str:
        """The first key in use that adds to the model's tools or output; empty if none."""
        return "gateway.tools" if self.tools else "gateway.shim_tool" if self.shim_tool else ""
