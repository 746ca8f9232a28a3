"""Merge layers of values into a Config.

The layers are defaults, a base mapping (a preset or the config of a resumed run), the file, and `a.b=c`
overrides. An unknown key is an error with a suggestion. Errors are `ConfigError`, one line each.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from insitu.config.base import Table, description
from insitu.config.tables import Config
from insitu.errors import ConfigError, boundary

WARM_START = Path(__file__).parents[1] / "demo" / "warm_start"
"""The model folder that ships with the package."""
EXAMPLES = Path(__file__).parents[1] / "examples"
"""The example configurations that ship with the package."""

RENAMED: Mapping[str, str] = {
    "collect.error_limit": "collect.max_consecutive_failures",
    "collect.lost_alarm": "collect.excluded_tokens_alarm",
    "collect.mask_alarm": "collect.infra_failure_alarm",
    "collect.overdue": "collect.late_groups",
    "collect.refill": "collect.replace_degenerate",
    "collect.starve_limit_s": "collect.stall_timeout_s",
    "collect.window": "collect.lookahead",
    "engine.patience_s": "engine.max_wait_s",
    "engine.return_timeout_s": "engine.reconnect_timeout_s",
    "grade.min_strength": "grade.min_trust",
    "harness.recycle_rollouts": "harness.max_rollouts_per_process",
    "model.family": "model.renderer",
    "model.retention": "model.keep_reasoning",
    "sandbox.boot_tries": "sandbox.boot_attempts",
    "sandbox.permits": "sandbox.max_sandboxes",
    "tasks.bad_rows": "tasks.on_invalid_row",
    "tasks.build_action": "tasks.parse_answer",
    "tasks.evaluate_response": "reward.function",
    "tasks.reward": "reward.function",
    "tasks.families": "tasks.kinds",
    "tasks.gate": "tasks.allowlist",
    "tasks.transform_sample": "tasks.transform",
    "train.opsm": "train.off_policy_mask",
}
"""Earlier names of keys; the error for one of them gives the present name."""

Raw = Mapping[str, Any]


def load_config(
    path: Path | str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    base: Raw | None = None,
    tables: Raw | None = None,
) -> Config:
    """Merge defaults < `base` < file at `path` < `tables` < `overrides` and validate the result.

    Overrides are "table.key=value" strings, or a mapping from "table.key" to the value. Raises ConfigError
    with one line.
    """
    layers: list[tuple[str, Raw]] = []
    if base is not None:
        layers.append(("base configuration", base))
    if path is not None:
        layers.append((str(path), read_toml(Path(path))))
    if tables:
        layers.append(("keyword tables", tables))
    if isinstance(overrides, Mapping):
        layers += [(f"override {name!r}", _nested(name, value)) for name, value in overrides.items()]
    else:
        layers += [(f"override {text!r}", _parse_override(text)) for text in overrides]
    merged: dict[str, dict[str, Any]] = {}
    for origin, raw in layers:
        _check_keys(raw, origin)
        for table, values in raw.items():
            merged.setdefault(table, {}).update(values)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(item) for item in error.errors())) from error


def read_toml(path: Path) -> Raw:
    """Return the file as a mapping; raise ConfigError if it is missing or not TOML."""
    with boundary(ConfigError, f"cannot read {path}"):
        return tomllib.loads(_resolve_example(path).read_text(encoding="utf-8"))


def _resolve_example(path: Path) -> Path:
    """Return the package's own `examples/demo.toml` if the current folder has none."""
    packaged = EXAMPLES / path.name
    return packaged if path.parent == Path("examples") and packaged.exists() and not path.exists() else path


def demo_preset() -> Raw:
    """Return the values of `insitu demo`: the file examples/demo.toml."""
    return read_toml(EXAMPLES / "demo.toml")


def model_folder(config: Config) -> Path:
    """Return the folder with initial weights, tokenizer and template; raise ConfigError if invalid."""
    folder = Path(config.model.path) if config.model.path else WARM_START
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(f"model.path: {folder} is not a model folder: it has no tokenizer.json")
    return folder


def dump_toml(config: Config, *, comments: bool = True) -> str:
    """Return the whole configuration as TOML; `load_config` of the text returns an equal Config."""
    lines: list[str] = []
    for table, field in Config.model_fields.items():
        values: Table = config.__dict__[table]
        lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
        kind = type(field.default)
        for key, info in kind.model_fields.items():
            text = f"{key} = {_toml(values.__dict__[key])}"
            words = description(info) if comments else ""
            lines.append(f"{text}  # {words}" if words else text)
    return "\n".join(lines) + "\n"


def dotted_keys() -> list[str]:
    """Return every key of the configuration as table.key."""
    return [
        f"{table}.{key}"
        for table, field in Config.model_fields.items()
        for key in type(field.default).model_fields
    ]


def _toml(value: bool | int | float | str | tuple[str | float, ...] | Mapping[str, str]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(name)} = {_toml(text)}" for name, text in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{value} cannot be written to a configuration file")
        return repr(value)
    return str(value)


def _parse_override(text: str) -> Raw:
    name, equals, value = text.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and table and key):
        hint = _suggest(name.strip(), dotted_keys()) if equals else ""
        raise ConfigError(f"override {text!r} is not of the form table.key=value{hint}")
    return {table: {key: _override_value(table, key, value.strip())}}


def _nested(name: str, value: object) -> Raw:
    table, dot, key = name.partition(".")
    if not (dot and table and key):
        raise ConfigError(f"override {name!r} is not of the form table.key{_suggest(name, dotted_keys())}")
    return {table: {key: value}}


def _override_value(table: str, key: str, text: str) -> Any:
    """Parse the value as TOML; for a text key, anything but a quoted string is taken literally."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["v"] if parsed.keys() == {"v"} else text
    return text if isinstance(_default(table, key), str) and not isinstance(value, str) else value


def _default(table: str, key: str) -> Any:
    if table not in Config.model_fields:
        return None
    field = type(Config.model_fields[table].default).model_fields.get(key)
    return field.default if field is not None else None


def _check_keys(raw: Raw, origin: str) -> None:
    known = dotted_keys()
    for table, values in raw.items():
        if table not in Config.model_fields:
            raise ConfigError(f"{origin}: unknown {_unknown_table(table, values, known)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{origin}: {table} must be a table [{table}]")
        for key in values:
            if f"{table}.{key}" not in known:
                raise ConfigError(f"{origin}: unknown key {table}.{key}{_suggest(f'{table}.{key}', known)}")


def _unknown_table(table: str, values: object, known: Sequence[str]) -> str:
    if isinstance(values, Mapping) and len(values) == 1:
        name = f"{table}.{next(iter(values))}"
        return f"key {name}{_suggest(name, known)}"
    if isinstance(values, Mapping):
        return f"table [{table}]{_suggest(table, list(Config.model_fields))}"
    return f"key {table}{_suggest(table, known)}"


def _suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint: the new name, else the same key of another table, else a similar key."""
    if new := RENAMED.get(name):
        return f"; it is now {new}"
    key = name.rpartition(".")[2]
    same_key = [k for k in known if k.rpartition(".")[2] == key]
    close = difflib.get_close_matches(name, same_key, n=1, cutoff=0.8)
    found = close or same_key or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _describe(item: Any) -> str:
    """Return one line with the invalid value of a key; the values of a whole table are omitted."""
    where = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not where:
        return message
    value = "" if isinstance(item["input"], Mapping) else f", got {item['input']!r}"
    choices = re.findall(r"'([^']*)'", message) if item["type"] == "literal_error" else []
    close = difflib.get_close_matches(str(item["input"]), choices, n=1)
    return f"{where}: {message}{value}" + (f"; did you mean {close[0]}?" if close else "")
