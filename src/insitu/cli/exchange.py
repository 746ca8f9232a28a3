"""Commands that exchange files with other programs and machines: `export`, `import`, `push`, `deploy`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import orjson


def export_verb(options: argparse.Namespace) -> int:
    """Write a run's rollouts in another form, without --out JSON lines on stdout; or a checkpoint."""
    from insitu.tools import RolloutExport, export_with, steps_of

    if options.checkpoint:
        return _export_model(options)
    wanted = RolloutExport(
        run=options.run,
        to=options.to,
        out=options.out,
        phase=options.phase,
        steps=steps_of(options.steps),
        check=options.check,
        send=options.send,
    )
    report = export_with(wanted, sys.stdout.buffer)
    if options.out is not None:
        print(orjson.dumps(report).decode() if options.json else "\n".join(_lines(report)))
    return 0


def _export_model(options: argparse.Namespace) -> int:
    from insitu.errors import ConfigError
    from insitu.tools import export_model

    if options.out is None:
        raise ConfigError("--checkpoint needs --out DIR")
    to = "hf" if options.to == "jsonl" else options.to
    report = export_model(options.run, options.out, checkpoint=options.checkpoint, to=to, dtype=options.dtype)
    text = "{out}: step {step}, {to}, {dtype}, {bytes:,} bytes".format(**report)
    print(orjson.dumps(report).decode() if options.json else text)
    return 0


def _lines(report: Mapping[str, Any]) -> list[str]:
    """Return the counts and the account of tokens for people."""
    account = report["account"]
    left_out = "".join(f", {tokens:,} {reason}" for reason, tokens in account["excluded"].items())
    lines = [
        f"{report['out']}: {report['rollouts']:,} rollouts, {report['rows']:,} rows, {report['tokens']:,}"
        f" tokens, {report['bytes']:,} bytes",
        f"sampled tokens: {account['captured']:,}; trained {account['trained']:,}{left_out}",
    ]
    if report["lost"]:
        lines.append(f"{report['to']} has no place for: {', '.join(report['lost'])}")
    if report.get("checked"):
        lines.append("read back: every value equals the run's")
    return lines


def import_verb(options: argparse.Namespace) -> int:
    """Make a run directory from an export."""
    from insitu.tools import import_run

    run = import_run(options.folder, options.out, options.overrides)
    print(f"{run.path}: {len(run.steps)} steps; see insitu show {run.path}")
    return 0


def push_verb(options: argparse.Namespace) -> int:
    """Upload a checkpoint or the rollouts of a run."""
    from insitu.tools import push

    report = push(options.what, options.to, public=options.public, dry_run=options.dry_run)
    if options.json:
        print(orjson.dumps(report).decode())
        return 0
    for name, size in report["files"].items():
        print(f"{size:>14,}  {name}")
    for rollout_id in report["left_out"]:
        print(f"left out, holds what looks like a secret: {rollout_id}")
    seen = "private" if report["private"] else "public"
    print(f"{seen} {report['kind']} {report['repo']}: {report['url'] or 'not uploaded (--dry-run)'}")
    return 0


def deploy_verb(options: argparse.Namespace) -> int:
    """Write a deployment's folder."""
    from insitu.tools import DeployOptions, deploy

    wanted = DeployOptions(
        target=options.target,
        config=options.config,
        out=options.out,
        name=options.name,
        nodes=options.nodes,
        gpus=options.gpus,
        image=options.image,
    )
    made = deploy(wanted)
    print("\n".join([*(str(path) for path in made.files), *(f"before use: {need}" for need in made.needs)]))
    return 0
