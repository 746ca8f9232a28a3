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


def gateway_config(config: Config, log_dir: Path | None = None) -> GatewayConfig:
    """Return the gateway options; raise ConfigError for invalid host tools."""
    table = config.gateway
    tool, _, argument = table.shim_tool.partition(":")
    shim = TextShim(tool=tool, argument=argument or "command", whole_text=table.shim_whole_text)
    return GatewayConfig(
        engine_deadline_s=config.engine.call_timeout_s,
        auxiliary=table.auxiliary,
        keep_reasoning=config.model.keep_reasoning,
        tools=read_tools(Path(table.tools)) if table.tools else (),
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


def read_tools(path: Path) -> tuple[HostTool, ...]:
    """Return host tools from a JSON file, a list of {name, description, parameters}.

    Raises ConfigError.
    """
    with boundary(ConfigError, f"cannot read {path}"):
        listed = orjson.loads(path.read_bytes())
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: must be a list of host tools")
    try:
        tools = tuple(HostTool(**ToolBody.model_validate(tool).model_dump()) for tool in listed)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_invalid(error)}") from error
    ToolBox(tools)
    return tools
