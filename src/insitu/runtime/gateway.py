"""Gateway options from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import orjson
from pydantic import ValidationError

from insitu import registry
from insitu.config import Config
from insitu.errors import ConfigError, boundary, describe_invalid
from insitu.gateway.admin import ToolBody
from insitu.gateway.host_tools import HostTool, ToolBox
from insitu.gateway.request import GatewayConfig
from insitu.gateway.server import Gateway
from insitu.gateway.text_tool_calls import TextShim
from insitu.gateway.tool_hooks import ToolHook


def gateway_config(config: Config, log_dir: Path | None = None) -> GatewayConfig:
    """Return the gateway options; raise ConfigError for invalid host tools or no such hook."""
    table = config.gateway
    tool, _, argument = table.shim_tool.partition(":")
    shim = TextShim(tool=tool, argument=argument or "command", whole_text=table.shim_whole_text)
    tools, hook = _tools_and_hook(table.tools) if table.tools else ((), None)
    return GatewayConfig(
        engine_deadline_s=config.engine.call_timeout_s,
        auxiliary=table.auxiliary,
        keep_reasoning=config.model.keep_reasoning,
        tools=tools,
        hook=hook,
        shim=shim if table.shim_tool else None,
        log_dir=log_dir,
    )


def public_url(
    config: Config, gateway: Gateway, origin: str, say: Callable[[str], None], *, needed: bool = False
) -> AbstractAsyncContextManager[str]:
    """Return a context with the public URL of a gateway at `origin`, once it was probed; "" without one.

    `needed`: agents run where only a URL reaches the gateway; that of a Space is used for them only. Raises
    SetupError if the URL does not lead to this gateway.
    """
    if not (needed or config.gateway.public_url):
        return nullcontext("")
    found: AbstractAsyncContextManager[str] = registry.find("parts", "open_public_url")(
        config, gateway, origin, say
    )
    return found


def _tools_and_hook(name: str) -> tuple[tuple[HostTool, ...], ToolHook | None]:
    """Return the host tools of a JSON file, or those of a hook's attribute `tools` and the hook."""
    if ":" in name and not Path(name).exists():
        found = registry.find("hooks", name)
        if not callable(found):
            raise ConfigError(f"gateway.tools: {name} is a {type(found).__name__}, not a function")
        hook: ToolHook = registry.find("parts", "tool_hook")(name, found)
        return _host_tools(name, getattr(found, "tools", [])), hook
    return read_tools(Path(name)), None


def read_tools(path: Path) -> tuple[HostTool, ...]:
    """Return host tools from a JSON file, a list of {name, description, parameters}.

    Raises ConfigError.
    """
    with boundary(ConfigError, f"cannot read {path}"):
        listed = orjson.loads(path.read_bytes())
    return _host_tools(str(path), listed)


def _host_tools(path: str, listed: object) -> tuple[HostTool, ...]:
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: must be a list of host tools")
    try:
        tools = tuple(HostTool(**ToolBody.model_validate(tool).model_dump()) for tool in listed)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_invalid(error)}") from error
    ToolBox(tools)
    return tools
