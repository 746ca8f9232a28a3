"""Which host of a deployment has which part: the ranks that each brings, and the table of `--dry-run`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from insitu.config import Config
from insitu.config.training import split_ranks
from insitu.engines.server_command import SERVERS
from insitu.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The ranks of the trainer over hosts; the first host has the learner."""

    here: int
    """Ranks of the first host."""
    each: int
    """Ranks of each other host; 0 = all are on the first."""
    port: int
    """Where the learner waits for the others; 0 without any."""


def spread(config: Config, nodes: int, gpus: int) -> Spread:
    """Divide the ranks of train.ranks over hosts; its HOST does not count. Raises ConfigError."""
    here, world, address = split_ranks(config.train.ranks)
    there, others = world - here, nodes - 1
    if address and not others:
        raise ConfigError(
            f"train.ranks = {config.train.ranks}: {there} ranks come from other hosts: give --nodes, above 1"
        )
    if there % max(others, 1):
        raise ConfigError(
            f"train.ranks = {config.train.ranks}: {there} ranks do not divide over {others} other hosts"
            f" (--nodes {nodes})"
        )
    each = there // others if others else 0
    on_gpus = gpus and config.policy.kind == "hf" and config.policy.device != "cpu"
    if on_gpus and max(here, each) > gpus:
        raise ConfigError(
            f"train.ranks = {config.train.ranks}: {max(here, each)} ranks on one host, which has"
            f" --gpus {gpus}: one each"
        )
    return Spread(here=here, each=each, port=int(address.rpartition(":")[2]) if address else 0)


def placement(config: Config, nodes: int, gpus: int) -> list[str]:
    """Return the table of who has what, a line a host, and what is elsewhere. Raises ConfigError."""
    ranks = spread(config, nodes, gpus)
    engine, elsewhere = _engine(config)
    rows = [("host", "controller", "ranks of the trainer", "engine", "agents and sandboxes", "GPUs")]
    for host in range(nodes):
        first = ("yes", f"{ranks.here} and the learner", engine)
        parts = ("-", str(ranks.each or "-"), "-") if host else first
        rows.append((str(host + 1), *parts, _agents(config, host, nodes), str(gpus)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
    return [*(line.rstrip() for line in lines), *elsewhere, *_checked(ranks)]


def _engine(config: Config) -> tuple[str, list[str]]:
    """Return what samples on the first host, and a line about what samples elsewhere."""
    engine = config.engine
    if engine.kind == "embedded":
        return "in rank 0", []
    if engine.kind in SERVERS and engine.launch:
        return f"{engine.replicas} of {engine.kind}", []
    here = [url for url in engine.urls if urlsplit(url).hostname in LOOPBACK]
    if engine.kind in SERVERS and here:
        return f"{engine.kind} ({here[0]})", []
    return "-", [f"elsewhere: engine {engine.kind}{''.join(f' {url}' for url in engine.urls)}"]


def _agents(config: Config, host: int, nodes: int) -> str:
    fleet, many = config.fleet, f"{config.harness.workers} at a time, {'/'.join(config.sandbox.kinds)}"
    if fleet.kind == "none":
        return "-" if host else many
    if fleet.kind == "processes":
        return "-" if host else f"{fleet.nodes} nodes, each {many}"
    if fleet.nodes and fleet.nodes < nodes:
        return f"{many}, if one of {fleet.nodes}"
    return many


def _checked(ranks: Spread) -> list[str]:
    if not ranks.each:
        return []
    return [
        "at the start each host is compared with the first, a line each in logs/learner.log: secret, insitu,"
        " torch, clock, weights (SHA-256)"
    ]
