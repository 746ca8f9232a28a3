"""Merge layers of values into a Config.

The layers are defaults, a base mapping (a preset or the config of a resumed run), the file, and `a.b=c`
overrides. An unknown key is an error with a suggestion. Errors are `ConfigError`, one line each.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from insitu import registry
from insitu.config.arms import arms_of_eval, arms_of_set
from insitu.config.base import HUB, STORED, Table, description
from insitu.config.tables import Config
from insitu.config.tasks import LAYERS, EvalTable, TaskSetTable
from insitu.errors import ConfigError, boundary

log = logging.getLogger(__name__)

WARM_START = Path(__file__).parents[1] / "warm_start"
"""The model folder that ships with the package."""
EXAMPLES = Path(__file__).parents[1] / "examples"
"""The example configurations that ship with the package."""

PROFILES = Path(__file__).parent / "profiles"
"""A file per value of run.profile."""
REPEATED = ("tasks", "eval")
"""Tables that a file may hold several of."""
RENAMED: Mapping[str, str] = {
    "collect.excluded_tokens_alarm": "run.alarms.excluded_tokens",
    "collect.infra_failure_alarm": "run.alarms.infra_failure",
    "collect.reward_alarm": "run.alarms.reward",
    "collect.tamper_alarm": "run.alarms.tamper",
    "collect.unparsed_alarm": "run.alarms.unparsed",
    "train.collapse_alarm": "run.alarms.collapse",
    "train.kl_alarm": "run.alarms.kl",
    "train.reference_alarm": "run.alarms.reference_kl",
    "engine.reconnect_timeout_s": "engine.start_timeout_s",
    "gateway.host": "gateway.listen",
    "gateway.port": "gateway.listen",
    "gateway.tunnel": "gateway.public_url",
    "engine.cache_write_price": "engine.prices.cache_write",
    "engine.cached_price": "engine.prices.cached",
    "engine.input_price": "engine.prices.input",
    "engine.output_price": "engine.prices.output",
    "engine.tensor_parallel": "engine.gpus",
    "engine.url": "engine.urls",
    "train.cispo_cap": "train.clip",
    "train.clip_high": "train.clip",
    "train.clip_low": "train.clip",
    "train.correction_high": "train.correction_bounds",
    "train.correction_low": "train.correction_bounds",
    "train.dppo_low": "train.clip",
    "train.overlong_margin_tokens": "train.overlong_tokens",
    "train.start_timeout_s": "train.step_timeout_s",
    "engine.train_price": "engine.prices.train",
    "sft.checkpoint_every_steps": "run.checkpoint_every_steps",
    "sft.decay": "train.decay",
    "sft.epochs": "train.epochs",
    "sft.lr": "train.lr",
}
"""Earlier names of keys; the error for one of them gives the present name."""
GONE = {"eval.max_s", "rollout.start", "sandbox.mode"}
"""Earlier keys that nothing replaces: a similar name would be a wrong hint."""

Raw = Mapping[str, Any]
Layered = TypeVar("Layered", TaskSetTable, EvalTable)


def load_config(
    path: Path | str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    base: Raw | None = None,
    tables: Raw | None = None,
    *,
    stored: bool = False,
) -> Config:
    """Merge defaults < run.profile < `base` < file at `path` < `tables` < `overrides`, and validate them.

    Overrides are "table.key=value" strings, or a mapping from "table.key" to the value; tasks.NAME.key and
    eval.NAME.key change one of several tables. `stored`: names of plug-ins are not looked up. Raises
    ConfigError with one line.
    """
    layers: list[tuple[str, Raw]] = []
    if base is not None:
        layers.append(("config.toml" if stored else "base configuration", base))
    if path is not None:
        layers.append((str(path), read_toml(Path(path))))
    if tables:
        layers.append(("keyword tables", tables))
    problems: list[str] = []
    for origin, read in _overriding(overrides):
        try:
            layers.append((origin, read()))
        except ConfigError as error:
            problems.append(str(error))
    problems += [problem for origin, raw in layers for problem in _wrong_keys(raw, origin)]
    if problems:
        raise ConfigError("; ".join(problems))
    merged: dict[str, Any] = {}
    for origin, raw in [*_profile([raw for _, raw in layers]), *layers]:
        for table, values in raw.items():
            merged[table] = _merged(table, merged.get(table), values, origin)
    context = STORED if stored else None
    try:
        return _with_named_layers(Config.model_validate(merged, context=context), context)
    except ValidationError as error:
        # a list without its invalid elements is too short besides
        inside = {item["loc"][0] for item in error.errors() if len(item["loc"]) > 1}
        found = [i for i in error.errors() if i["type"] != "too_short" or i["loc"][0] not in inside]
        raise ConfigError("; ".join(_describe(item, merged) for item in found)) from error


def _profile(layers: Sequence[Raw]) -> Iterator[tuple[str, Raw]]:
    """Yield the layer of the profile that the last of the layers names."""
    named = [raw["run"]["profile"] for raw in layers if "profile" in raw.get("run", {})]
    if len({*named}) > 1 and layers[0].keys() == Config.model_fields.keys():
        raise ConfigError("run.profile has no effect on a whole configuration, which sets every key")
    if (file := PROFILES / f"{named[-1] if named else ''}.toml").is_file():
        yield f"profile {file.stem}", read_toml(file)


def _overriding(overrides: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Raw]]]:
    """Yield the origin of each override, and what reads it."""
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            yield f"override {name!r}", functools.partial(_nested, name, value)
    else:
        for text in overrides:
            yield f"override {text!r}", functools.partial(_parse_override, text)


def _merged(table: str, known: Any, values: Any, origin: str) -> Any:
    """Return a table with the keys of `values`; for a repeated table in each, unless `values` is a list.

    A key NAME.key is that of one table.
    """
    if table not in REPEATED:
        return {**(known or {}), **values}
    if not isinstance(values, Mapping):
        return [dict(one) for one in values]
    tables = [dict(one) for one in known or [{}]]
    for key, value in values.items():
        name, path = _split(key)
        usual = table_classes()[table].model_fields["name"].default
        chosen = [one for one in tables if not name or one.get("name", usual) == name]
        if not chosen:
            names = ", ".join(filter(None, (one.get("name", usual) for one in tables))) or "none with a name"
            raise ConfigError(f"{origin}: no {table} named {name!r}; there are: {names}")
        for one in chosen:
            one[path[0]] = value if len(path) == 1 else {**one.get(path[0], {}), path[1]: value}
    return tables


def _split(key: str) -> tuple[str, Sequence[str]]:
    """Return the name in a key of a repeated table, or "", and the key or layer and key behind it."""
    name, dot, rest = key.partition(".")
    return (name, rest.split(".", 1)) if dot and name not in LAYERS else ("", key.split(".", 1))


def _with_named_layers(config: Config, context: str | None) -> Config:
    """Return the configuration with validated values in the tables of its sets, e.g. absolute paths."""

    def named(table: Layered, own: Config) -> Layered:
        layers = {
            name: {key: own.__dict__[name].__dict__[key] for key in getattr(table, name)} for name in LAYERS
        }
        return table.model_copy(update=layers)

    _check_sets(config)
    sets = []
    for table in config.tasks:
        each = zip(table.agents, [*arms_of_set(config, table, context=context)][1:], strict=True)
        agents = tuple({key: arm.config.harness.__dict__[key] for key in keys} for keys, arm in each)
        alone = table.model_copy(update={"agents": ()})
        (arm,) = arms_of_set(config, alone, context=context)
        sets += [named(alone, arm.config).model_copy(update={"agents": agents})]
    evaluations = tuple(
        named(one, next(arms_of_eval(config, one, context)).config) if one.layered else one
        for one in config.eval
    )
    return config.model_copy(update={"tasks": tuple(sets), "eval": evaluations})


def _check_sets(config: Config) -> None:
    """Raise ConfigError where the task sets together leave nothing to train on."""
    # not in Config itself: each set has a configuration of its own
    if not sum(table.weight for table in config.tasks):
        raise ConfigError("the weights of [[tasks]] sum to 0: there is nothing to train on")
    for table in config.tasks:
        if table.weight and len(table.agents) > config.collect.group_size:
            where = ".".join(filter(None, ["tasks", table.name, "agents"]))
            raise ConfigError(
                f"{where}: {len(table.agents)} agents need collect.group_size of as many or more"
            )
        if table.reference and not table.weight:
            where = ".".join(filter(None, ["tasks", table.name, "reference"]))
            raise ConfigError(f"{where} has no effect with weight = 0")
    parsing = [table.parse_answer for table in config.tasks]
    if any(parsing) and all(arm.config.harness.agent != "single_turn" for arm in config.arms.values()):
        raise ConfigError("tasks.parse_answer has no effect without the agent single_turn")
    teachers = [config.train.reference, *(table.reference for table in config.tasks)]
    if config.train.advantage == "zero" and not any(teachers):
        raise ConfigError("train.advantage = 'zero' needs train.reference: a model teaches itself nothing")


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


def model_folder(config: Config, say: Callable[[str], None] = log.info) -> Path:
    """Return the folder with initial weights, tokenizer and template; raise ConfigError if invalid.

    A model in another form is made into one first, once; `say` gets a line about it.
    """
    folder = Path(config.model.path) if config.model.path else WARM_START
    if kind := model_kind(config.model.path):
        folder = registry.find("models", kind)(config.model.path, say)
    if not (folder / "tokenizer.json").exists():
        raise ConfigError(f"model.path: {folder} is not a model folder: it has no tokenizer.json")
    tools = config.model.renderer.partition("?")[0] == "hermes"
    return registry.find("models", "hermes")(str(folder), say) if tools else folder


def model_kind(path: str) -> str:
    """Return the registry's name of what makes a model folder of `path`; empty for a folder."""
    return "hub" if path.startswith(HUB) else "gguf" if path.endswith(".gguf") else ""


def dump_toml(config: Config, *, comments: bool = True) -> str:
    """Return the whole configuration as TOML; `load_config` of the text returns an equal Config."""
    lines: list[str] = []
    for name, values in tables_of(config):
        lines += [*([""] if lines else []), f"[[{name}]]" if name in REPEATED else f"[{name}]"]
        for key, info in type(values).model_fields.items():
            text = f"{key} = {_toml(values.__dict__[key])}"
            words = description(info) if comments else ""
            lines.append(f"{text}  # {words}" if words else text)
    return "\n".join(lines) + "\n"


def tables_of(config: Config) -> Iterator[tuple[str, Table]]:
    """Yield every table with its name; a repeated one, e.g. [[tasks]], once for each."""
    for name in Config.model_fields:
        value = config.__dict__[name]
        yield from ((name, one) for one in (value if name in REPEATED else (value,)))


@functools.cache
def table_classes() -> Mapping[str, type[Table]]:
    """Return the class of each table by its name."""
    return {name: type(one) for name, one in tables_of(Config())}


@functools.cache
def dotted_keys() -> tuple[str, ...]:
    """Return every key of the configuration as table.key."""
    return tuple(f"{table}.{key}" for table, kind in table_classes().items() for key in kind.model_fields)


def known_keys(tables: Raw) -> dict[str, Any]:
    """Return tables without the keys that do not exist; a table that does not, of another program, stays."""

    def known(table: str, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return [known(table, one) for one in values] if isinstance(values, list | tuple) else values
        inner = {"agents": "harness", **{name: name for name in LAYERS}} if table in REPEATED else {}
        fields = table_classes()[table].model_fields
        kept = {key: value for key, value in values.items() if key in fields}
        return {key: known(inner[key], value) if key in inner else value for key, value in kept.items()}

    return {name: known(name, own) if name in Config.model_fields else own for name, own in tables.items()}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(name)} = {_toml(text)}" for name, text in value.items()) + "}"
    if isinstance(value, tuple | list):
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
    return {table: {key: _override_value(*_place(table, key), value.strip())}}


def _nested(name: str, value: object) -> Raw:
    table, dot, key = name.partition(".")
    if not (dot and table and key):
        raise ConfigError(f"override {name!r} is not of the form table.key{_suggest(name, dotted_keys())}")
    return {table: {key: value}}


def _override_value(table: str, key: str, text: str) -> Any:
    """Parse the value as TOML; for a text key, anything but a quoted string is taken literally.

    For a key with a list, text that is not TOML is its elements, with commas between them.
    """
    try:
        parsed = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text.split(",") if text and isinstance(_default(table, key), tuple) else text
    value = parsed["v"] if parsed.keys() == {"v"} else text
    return text if isinstance(_default(table, key), str) and not isinstance(value, str) else value


def _default(table: str, key: str) -> Any:
    if table not in Config.model_fields:
        return None
    field = table_classes()[table].model_fields.get(key)
    return field.default if field is not None else None


def _wrong_keys(raw: Raw, origin: str) -> Iterator[str]:
    """Yield a line for every table and key that does not exist."""
    known = dotted_keys()
    for table, values in raw.items():
        if table not in Config.model_fields:
            yield f"{origin}: unknown {_unknown_table(table, values, known)}"
            continue
        several = table in REPEATED and isinstance(values, list | tuple)
        for one in values if several else [values]:
            if not isinstance(one, Mapping):
                yield f"{origin}: {table} must be a table [{table}]"
                continue
            for key, value in one.items():
                place = key_of(f"{table}.{key}")
                if place not in known:
                    yield f"{origin}: unknown key {table}.{key}{_suggest(place, known)}"
                elif table in REPEATED and key in LAYERS:
                    yield from _wrong_keys({key: value}, f"{origin}: in {table}")
                elif (table, _split(key)[1][0]) == ("tasks", "agents"):
                    yield from _wrong_agents(value, f"{origin}: in {table}.{key}")


def _wrong_agents(value: object, origin: str) -> Iterator[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) for one in value):
        yield f"{origin}: must be a list of tables with keys of [harness]"
        return
    for agent in value:
        yield from _wrong_keys({"harness": agent}, origin)


def key_of(override: str) -> str:
    """Return table.key of "table.key=value"; tasks.NAME.key is tasks.key."""
    table, _, key = override.partition("=")[0].strip().partition(".")
    return ".".join(_place(table, key))


def _place(table: str, key: str) -> tuple[str, str]:
    """Return table and key that describe a value; for one of a layer those of the layer."""
    path = _split(key)[1] if table in REPEATED else [key]
    return (path[0], path[1]) if len(path) > 1 and path[0] in LAYERS else (table, ".".join(path))


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
    if name in GONE:
        return "; it is gone"
    key = name.rpartition(".")[2]
    same_key = [k for k in known if k.rpartition(".")[2] == key]
    close = difflib.get_close_matches(name, same_key, n=1, cutoff=0.8)
    found = close or same_key or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _describe(item: Any, merged: Raw) -> str:
    """Return one line with the invalid value of a key; the values of a whole table are omitted."""
    table, *rest = item["loc"] or ("",)
    if table in REPEATED and rest:
        one = merged[table][rest[0]]
        rest[:1] = [one.get("name") or rest[0] + 1] if len(merged[table]) > 1 else []
    where = ".".join(map(str, [table, *rest]))
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not where:
        return message
    value = "" if isinstance(item["input"], Mapping) else f", got {item['input']!r}"
    choices = re.findall(r"'([^']*)'", message) if item["type"] == "literal_error" else []
    close = difflib.get_close_matches(str(item["input"]), choices, n=1)
    return f"{where}: {message}{value}" + (f"; did you mean {close[0]}?" if close else "")
