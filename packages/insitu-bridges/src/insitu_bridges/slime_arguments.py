"""slime's arguments against insitu's configuration: what must be the engine's, and what becomes a limit.

slime divides logits by `rollout_temperature` and trains the distribution that its own arguments describe, so
its trainer is wrong about every token that was sampled otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from insitu.config import Config
from insitu.errors import ConfigError
from insitu_bridges.process import read_named

_ARGUMENTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "max_new_tokens": "max_response_len",
    "min_new_tokens": "min_new_tokens",
}
"""A sampling parameter -> slime's argument, without `rollout_` or `eval_`."""
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0, 1 << 30),  # the last is what SGLang makes of -1
    "min_p": (0.0,),
    "min_new_tokens": (0,),
    "n": (1,),
    "repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "ignore_eos": (0,),
}
"""Values that leave the distribution as the model gives it, which is what the engine samples."""
_FORM = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "sampling_seed"}
"""Parameters that change no probability: the form of the text, and the random stream, which is insitu's."""


def rollout_sampling(args: Any, *, evaluation: bool = False) -> dict[str, Any]:
    """Return the sampling parameters that slime's arguments ask for, by SGLang's names; None are left out."""
    found: dict[str, Any] = {}
    for kind in ("rollout", "eval")[: 2 if evaluation else 1]:
        for name, suffix in _ARGUMENTS.items():
            if (value := getattr(args, f"{kind}_{suffix}", None)) is not None:
                found[name] = value
    return found


def check_sampling(
    parameters: Mapping[str, Any], config: Config, stop_ids: Callable[[], Set[int]] = frozenset
) -> None:
    """Raise ConfigError for parameters that would sample otherwise than the engine does.

    stop_ids: the tokens that end a reply anyway.
    """
    for name, value in parameters.items():
        if value is None or value in ([], "", (), {}) or name in _FORM:
            continue
        if why := _difference(name, value, config, stop_ids):
            raise ConfigError(f"slime asks for {name} {value!r}, but {why}")


def _difference(name: str, value: Any, config: Config, stop_ids: Callable[[], Set[int]]) -> str:
    """Return what the engine does instead, or empty."""
    if name == "temperature":
        own = config.engine.temperature
        return "" if value == own else f"engine.temperature is {own:g}, in evaluations too"
    if name == "max_new_tokens":
        most = config.limits.max_call_tokens
        return f"limits.max_call_tokens is {most} and must not be larger" if value < most else ""
    if name == "stop_token_ids":
        ids = {value} if isinstance(value, int) else {*value}
        return "" if ids <= stop_ids() else f"the model's replies end at {sorted(stop_ids())}"
    if name in _NEUTRAL:
        return "" if value in _NEUTRAL[name] else f"the engine samples with {_NEUTRAL[name][0]}"
    return "the engine has no stop strings" if name == "stop" else "the engine does not know it"


def read_arguments(address: str, call_tokens: int, context_tokens: int) -> Config:
    """Return the configuration that INSITU_CONFIG names, with slime's router and lengths; 0 = not given.

    Lengths only lower limits. Raises ConfigError.
    """
    router: dict[str, Any] = {"engine.kind": "sglang", "engine.urls": [address]} if address else {}
    config = read_named(router)
    given: dict[str, Any] = {}
    if 0 < call_tokens < config.limits.max_call_tokens:
        given["limits.max_call_tokens"] = call_tokens
    if 0 < context_tokens < config.model.max_context_tokens:
        given["model.max_context_tokens"] = context_tokens
    config = read_named({**router, **given}) if given else config
    for name, arm in config.arms.items():
        if 0 < call_tokens < (own := arm.config.limits.max_call_tokens):
            raise ConfigError(
                f"slime: limits.max_call_tokens of {name or 'the tasks'} is {own},"
                f" above --rollout-max-response-len {call_tokens}"
            )
    return config


def router_address(args: Any) -> str:
    """Return the URL of slime's router, whose servers its trainer updates, or empty."""
    host, port = (getattr(args, f"sglang_router_{name}", None) for name in ("ip", "port"))
    return f"http://{host}:{port}" if host and port else ""
