"""Network attempts of a sandbox without a network: the kernel's count of packets without a route.

One request may count more than once (two address families, repeated name queries), and the agent program's
own requests count as well. Loopback traffic does not.
"""

from __future__ import annotations

from insitu.errors import SandboxError
from insitu.sandbox.base import Sandbox

COUNTERS = ("/proc/net/snmp", "/proc/net/snmp6")
READ_S = 10.0


async def egress_attempts(sandbox: Sandbox) -> int | None:
    """Return the attempts since the start, None where the kernel does not count them."""
    try:
        read = await sandbox.exec(["/bin/cat", *COUNTERS], timeout_s=READ_S, max_output_bytes=64 << 10)
    except SandboxError:
        return None
    return count(read.stdout.decode("ascii", "replace"))


def count(snmp: str) -> int | None:
    """Return the sum over both address families of packets without a route, None if it is missing."""
    lines = [line.split() for line in snmp.splitlines()]
    tables = [line for line in lines if line[:1] == ["Ip:"]]
    if len(tables) != 2:
        return None
    found = dict(zip(*tables, strict=False)).get("OutNoRoutes", "")
    newer = {line[0]: line[1] for line in lines if len(line) == 2}.get("Ip6OutNoRoutes", "0")
    return int(found) + int(newer) if found.isdigit() and newer.isdigit() else None
