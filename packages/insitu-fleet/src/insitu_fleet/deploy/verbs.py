"""The verb `deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

from insitu.command import Arg
from insitu.errors import ConfigError
from insitu_fleet.deploy import Target


def deploy(
    target: Annotated[Target, Arg(positional=True, choices=get_args(Target))],
    config: Annotated[Path, Arg(positional=True, metavar="CONFIG", help="TOML file of the run")],
    out: Annotated[Path | None, Arg(metavar="DIR", help="new folder")] = None,
    name: Annotated[str, Arg(metavar="NAME", help="name of the job")] = "insitu",
    nodes: Annotated[int, Arg(metavar="N", help="machines (slurm, ray)")] = 1,
    gpus: Annotated[int, Arg(metavar="N", help="GPUs of a machine; 0 = CPU image")] = 0,
    image: Annotated[str, Arg(metavar="REF", help="k8s: the pushed image")] = "",
    dry_run: Annotated[bool, Arg(help="write nothing; print which host has which part")] = False,
) -> int:
    """Write a deployment's folder."""
    from insitu_fleet.deploy.folder import DeployOptions, place
    from insitu_fleet.deploy.folder import deploy as write_folder

    if out is None and not dry_run:
        raise ConfigError("give --out DIR, a new folder, or --dry-run")
    wanted = DeployOptions(
        target=target, config=config, out=out or Path(), name=name, nodes=nodes, gpus=gpus, image=image
    )
    if dry_run:
        print("\n".join(place(wanted)))
        return 0
    made = write_folder(wanted)
    print("\n".join([*(str(path) for path in made.files), *(f"before use: {need}" for need in made.needs)]))
    return 0
