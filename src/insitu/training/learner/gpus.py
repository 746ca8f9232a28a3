"""Order of the GPUs that a learner sees, so that trainer and server use different ones.

A server takes the first GPU by default. The learner's order is by memory in use, the last index first among
equals; it takes the first, its ranks one each. Uses nvidia-smi, so that the controller needs no torch.
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
"""Smaller differences in use do not count: a display, driver overhead."""


def chooses(config: Config) -> bool:
    """Return whether the trainer should avoid a server's GPU: not where both must share one."""
    served = config.engine.kind in ("vllm", "sglang")
    one = config.engine.share_gpu or config.engine.publish == "ipc"
    return served and not one and config.policy.kind == "hf" and config.policy.device != "cpu"


def least_used(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows all GPUs, the least used first.

    Empty where it is set, or there are fewer than two.
    """
    if VISIBLE in environment:
        return {}
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("using the driver's GPU order: %s", error)
        return {}
    found = []
    for at, line in enumerate(done.stdout.splitlines()):
        uuid, _, used = line.partition(",")
        if not used.strip().isdecimal():  # MIG devices report no memory in use
            return {}
        found.append((int(used) // _EQUAL_MIB, -at, uuid.strip()))
    return {VISIBLE: ",".join(uuid for _, _, uuid in sorted(found))} if len(found) > 1 else {}
