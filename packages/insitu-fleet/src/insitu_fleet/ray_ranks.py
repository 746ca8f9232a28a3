"""Ranks of the trainer on the hosts of a Ray cluster: what job.sh of `insitu deploy ray` runs.

    this process --placement group, one bundle a host--> task of each other host --> insitu ranks
      `- COMMAND (start.sh) with train.ranks, at whose end all end

The first bundle is of this machine, which has the learner. A lost host's task begins again when Ray finds
another machine for its bundle. Run as `python -m insitu_fleet.ray_ranks --hosts N --each K ... -- COMMAND`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from insitu.errors import InsituError, SetupError
from insitu.install_hints import install_extra
from insitu_fleet import ray_host
from insitu_fleet.ray_link import connect_error, one_line
from insitu_train.channel.host_link import SECRET

try:
    import ray
    from ray.exceptions import RayError
    from ray.util import get_node_ip_address
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    ray = None

PLACE_S = 60.0
"""Most time for the cluster to have the hosts free."""
END_S = 15.0
"""Time for hosts to end by themselves after the run."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of this program's arguments."""
    made = argparse.ArgumentParser(prog="insitu_fleet.ray_ranks", description=__doc__)
    made.add_argument("--hosts", type=int, required=True, help="this machine and those with ranks")
    made.add_argument("--here", type=int, required=True, help="ranks of this machine")
    made.add_argument("--each", type=int, required=True, help="ranks of each other host")
    made.add_argument("--port", type=int, required=True, help="where the learner waits")
    made.add_argument("--gpus", type=int, default=0, help="GPUs of a host; 0 = a CPU of each other one")
    made.add_argument("--model", default="", help="the start model on the other hosts")
    made.add_argument("command", nargs="+")
    return made


@contextmanager
def _cluster() -> Iterator[str]:
    """Connect to the cluster of this machine or of RAY_ADDRESS; yield this machine's address."""
    if ray is None:
        raise SetupError(f"ray is not installed: {install_extra('ray')}")
    ray.cloudpickle.register_pickle_by_value(ray_host)
    try:
        ray.init(address="auto", namespace="insitu", configure_logging=False, logging_level=logging.ERROR)
    except (RayError, RuntimeError, ValueError, OSError) as error:
        raise SetupError(f"no Ray cluster here: {connect_error(error)}") from error
    try:
        yield str(get_node_ip_address())
    finally:
        ray.shutdown()


@contextmanager
def _reserved(options: argparse.Namespace, address: str) -> Iterator[Any]:
    """Reserve a bundle on each host, the first on this machine. Raises SetupError."""
    share = {"GPU": options.gpus} if options.gpus else {"CPU": 1}
    first = {f"node:{address}": 0.001} | ({"GPU": options.gpus} if options.gpus else {})
    group = placement_group([first, *[share] * (options.hosts - 1)], strategy="STRICT_SPREAD")
    try:
        if not group.wait(PLACE_S):
            need = " and ".join(f"{count} {name}" for name, count in share.items())
            raise SetupError(
                f"no {options.hosts} hosts, this one ({address}) among them, with {need} free within"
                f" {PLACE_S:g} s: the Ray cluster has {', '.join(_machines())}"
            )
        yield group
    finally:
        remove_placement_group(group)


def _machines() -> list[str]:
    return [
        f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}:"
        f" {node['Resources'].get('CPU', 0):g} CPU, {node['Resources'].get('GPU', 0):g} GPU)"
        for node in ray.nodes()
        if node["Alive"]
    ]


def _start_hosts(options: argparse.Namespace, group: Any, address: str, secret: str) -> list[Any]:
    words = [f"{address}:{options.port}", "--ranks", str(options.each), "--forever"]
    words += ["--model", options.model] if options.model else []
    run = ray.remote(num_cpus=0, num_gpus=options.gpus, max_retries=-1)(ray_host.run_ranks)
    tasks = []
    for bundle in range(1, options.hosts):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        tasks.append(run.options(scheduling_strategy=strategy).remote(words, {SECRET: secret}))
    return tasks


def _train_ranks(options: argparse.Namespace, address: str) -> str:
    there = options.each * (options.hosts - 1)
    return f"{options.here}+{there}@{address}:{options.port}" if there else str(options.here)


def _follow(process: subprocess.Popen[bytes], tasks: list[Any]) -> int:
    """Wait for the command, then for the hosts; say which of these end with an error."""
    code = None
    while code is None:
        done, tasks = ray.wait(tasks, timeout=1.0) if tasks else ([], [])
        for task in done:
            _report(task)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(0.1 if tasks else 1.0)
    ended, left = ray.wait(tasks, num_returns=len(tasks), timeout=END_S) if tasks else ([], [])
    for task in ended:
        _report(task)
    for task in left:
        ray.cancel(task, force=True)
    return code if code >= 0 else 128 - code


def _report(task: Any) -> None:
    try:
        host, code, line = ray.get(task)
    except RayError as error:
        _say(f"a host is lost: {one_line(error)}")
        return
    if code:
        _say(f"host {host}: {line}")


def _say(line: str) -> None:
    print(f"ray: {line}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> int:
    """Run the command with ranks of other hosts and return its exit status. Raises SetupError."""
    secret = os.environ.get(SECRET) or secrets.token_hex(32)
    with _cluster() as address, _reserved(options, address) as group:
        variables = os.environ | {SECRET: secret, "TRAIN_RANKS": _train_ranks(options, address)}
        # Of a session of its own: it gets each signal once, from here.
        process = subprocess.Popen(
            options.command,
            env=variables,
            start_new_session=True,
            preexec_fn=ray_host.end_with_parent,
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: process.terminate())
        return _follow(process, _start_hosts(options, group, address, secret))


def main(argv: Sequence[str] | None = None) -> int:
    """Return the command's exit status, or 1 with one line on standard error."""
    try:
        return run(parser().parse_args(argv))
    except InsituError as error:
        _say(str(error))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
