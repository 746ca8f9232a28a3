"""Counts what a sandbox without a network tried to reach, from its kernel's own books.

Counted, by the network namespace of the sandbox: every connection, datagram and name query that the kernel
refused because nothing leads beyond the loopback. One wish may count more than once (two address families,
a name server asked again) and the agent program's own attempts count like the model's. Not counted: what
stays on the loopback, and what a program gives up before it asks the kernel.
"""

from __future__ import annotations

from insitu.errors import SandboxError
from insitu.sandbox.base import Sandbox

BOOKS = ("/proc/net/snmp", "/proc/net/snmp6")
READ_S = 10.0


async def egress_attempts(sandbox: Sandbox) -> int | None:
    """Since the sandbox was made. None where its kernel does not say; the sandbox must have no live agent."""
    try:
        read = await sandbox.exec(["/bin/cat", *BOOKS], timeout_s=READ_S, max_output_bytes=64 << 10)
    except SandboxError:
        return None
    return count(read.stdout.decode("ascii", "replace"))


def count(books: str) -> int | None:
    """Refusals for want of a route over both address families; None when `books` does not hold them."""
    lines = [line.split() for line in books.splitlines()]
    tables = [line for line in lines if line[:1] == ["Ip:"]]
    if len(tables) != 2:
        return None
    found = dict(zip(*tables, strict=False)).get("OutNoRoutes", "")
    newer = {line[0]: line[1] for line in lines if len(line) == 2}.get("Ip6OutNoRoutes", "0")
    return int(found) + int(newer) if found.isdigit() and newer.isdigit() else None
