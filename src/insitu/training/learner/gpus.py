"""Which GPUs a learner sees, and in which order: a server takes the first unless it is told otherwise.

The order is by what is in use, and of equals the last comes first, so that trainer and server are on two GPUs
where there are two, whichever started first. The learner takes the first it sees, its ranks one each. Asks
the driver's own program, so that the controller needs no torch. Called by process.py.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Mapping

from insitu.config import Config

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK = ("nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
_ASK_S = 10.0
_EQUAL_MIB = 1024
"""Use that differs by less is the same: a display, what a driver keeps."""


def chooses(config: Config) -> bool:
    """Whether the trainer should keep clear of a server's GPU: not where both must be on one."""
    served = config.engine.kind in ("vllm", "sglang")
    one = config.engine.share_gpu or config.engine.publish == "ipc"
    return served and not one and config.policy.kind == "hf" and config.policy.device != "cpu"


def least_used(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that shows all GPUs, those least in use first; nothing where it is set, or there are not
    two."""
    if VISIBLE in environment:
        return {}
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("GPUs are taken in the driver's order: %s", error)
        return {}
    found = []
    for at, line in enumerate(done.stdout.splitlines()):
        uuid, _, used = line.partition(",")
        if not used.strip().isdecimal():  # a part of a GPU (MIG) has no number of its own
            return {}
        found.append((int(used) // _EQUAL_MIB, -at, uuid.strip()))
    return {VISIBLE: ",".join(uuid for _, _, uuid in sorted(found))} if len(found) > 1 else {}
