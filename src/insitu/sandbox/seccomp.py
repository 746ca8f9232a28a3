"""The system calls a sandbox refuses, as a BPF program that its PID 1 installs before anything else runs
there.

Refused is what no coding agent needs and what the other walls do not hold: reading or steering another
process of the same user, the kernel's key rings (no wipe empties them), sockets that no network namespace
holds in (a hypervisor's, above all), new user namespaces, and interfaces that are mostly known from exploits.
All sandboxes show the same files of the machine, so calls that say or change which of these are in memory
would carry messages from one sandbox to another: they are refused, or do nothing. A refused call fails with
an ordinary error and kills nobody. Calls by the numbers of another architecture are refused altogether: they
would be a way around.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
CLONE_NEWUSER = 0x10000000
X32 = 0x40000000
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16

OTHERS_ARGUMENT = {
    "prlimit64": 0,
    "sched_setaffinity": 0,
    "sched_setattr": 0,
    "sched_setparam": 0,
    "sched_setscheduler": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
"""Calls that are refused unless this argument is 0, the caller itself: a lowered limit or priority of a warm
agent would last into its next rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    audit: int
    """AUDIT_ARCH_* of the kernel."""
    numbers: dict[str, int]


_COMMON = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "clone3": 435,
    "cachestat": 451,
}
_MACHINES = {
    "x86_64": _Machine(
        audit=0xC000003E,
        numbers=_COMMON
        | {
            "ptrace": 101,
            "kcmp": 312,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "bpf": 321,
            "perf_event_open": 298,
            "userfaultfd": 323,
            "setns": 308,
            "unshare": 272,
            "clone": 56,
            "socket": 41,
            "socketpair": 53,
            "prlimit64": 302,
            "setpriority": 141,
            "sched_setparam": 142,
            "sched_setscheduler": 144,
            "sched_setaffinity": 203,
            "sched_setattr": 314,
            "ioprio_set": 251,
            "io_setup": 206,
            "mincore": 27,
            "madvise": 28,
            "fadvise64": 221,
            "preadv2": 327,
            "pwritev2": 328,
        },
    ),
    "aarch64": _Machine(
        audit=0xC00000B7,
        numbers=_COMMON
        | {
            "ptrace": 117,
            "kcmp": 272,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "bpf": 280,
            "perf_event_open": 241,
            "userfaultfd": 282,
            "setns": 268,
            "unshare": 97,
            "clone": 220,
            "socket": 198,
            "socketpair": 199,
            "prlimit64": 261,
            "setpriority": 140,
            "sched_setparam": 118,
            "sched_setscheduler": 119,
            "sched_setaffinity": 122,
            "sched_setattr": 274,
            "ioprio_set": 30,
            "io_setup": 0,
            "mincore": 232,
            "madvise": 233,
            "fadvise64": 223,
            "preadv2": 286,
            "pwritev2": 287,
        },
    ),
}
MADV_COLD, MADV_PAGEOUT = 20, 21
RWF_FLAGS = 5
"""Place of the flags among the arguments of `preadv2`: whether to fail rather than read from a disk, and
whether to forget what was read."""
_UNKNOWN = ("clone3", "mincore", "cachestat", "io_setup")
"""Calls that fail as on a kernel without them: their callers know another way. The flags of `clone3` and of
the reads of `io_submit` lie in memory, out of a filter's sight."""
_NEVER = (
    "ptrace", "kcmp", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise",
    "add_key", "request_key", "keyctl",
    "io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd", "setns",
)  # fmt: skip


def program(machine: str) -> bytes:
    """The filter for `platform.machine()`; empty where the numbers are not known."""
    known = _MACHINES.get(machine)
    if known is None:
        return b""
    numbers = known.numbers
    code = [_op(_LOAD, _ARCH), _op(_EQUAL, known.audit, 1, 0), _refuse(errno.EPERM), _op(_LOAD, _NUMBER)]
    if machine == "x86_64":
        code += [_op(_AT_LEAST, X32, 0, 1), _refuse(errno.EPERM)]
    for name in _NEVER:
        code += _for(numbers[name], [_refuse(errno.EPERM)])
    for name in _UNKNOWN:
        code += _for(numbers[name], [_refuse(errno.ENOSYS)])
    for name in ("preadv2", "pwritev2"):
        code += _for(
            numbers[name],
            [_argument(RWF_FLAGS), _op(_EQUAL, 0, 1, 0), _refuse(errno.EOPNOTSUPP), _op(_RETURN, _ALLOW)],
        )
    # Advice may be ignored: the call succeeds and does nothing.
    code += _for(numbers["fadvise64"], [_refuse(0)])
    code += _for(
        numbers["madvise"],
        [
            _argument(2),
            _op(_EQUAL, MADV_COLD, 1, 0),
            _op(_EQUAL, MADV_PAGEOUT, 0, 1),
            _refuse(errno.EINVAL),
            _op(_RETURN, _ALLOW),
        ],
    )
    for name in ("clone", "unshare"):
        code += _for(numbers[name], [_argument(0), _op(_ANY_BIT, CLONE_NEWUSER, 0, 1), *_REFUSE_OR_ALLOW])
    for name, place in OTHERS_ARGUMENT.items():
        code += _for(numbers[name], [_argument(place), _op(_EQUAL, 0, 1, 0), *_REFUSE_OR_ALLOW])
    for name in ("socket", "socketpair"):
        code += _for(numbers[name], _renderers())
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` count the instructions that are left out."""
    return struct.pack("<HBBI", code, yes, no, value)


def _refuse(number: int) -> bytes:
    return _op(_RETURN, _ERROR | number)


_REFUSE_OR_ALLOW = (_refuse(errno.EPERM), _op(_RETURN, _ALLOW))


def _argument(place: int) -> bytes:
    """Load the lower half of an argument: all that the kernel reads of those we look at."""
    return _op(_LOAD, _ARGUMENTS + 8 * place)


def _for(number: int, body: list[bytes]) -> list[bytes]:
    """`body` must return: it overwrites the number that the next rule compares."""
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _renderers() -> list[bytes]:
    """Local and internet sockets, and the netlink protocol by which programs list their addresses."""
    return [
        _argument(0),
        _op(_EQUAL, AF_UNIX, 5, 0),
        _op(_EQUAL, AF_INET, 4, 0),
        _op(_EQUAL, AF_INET6, 3, 0),
        _op(_EQUAL, AF_NETLINK, 0, 3),
        _argument(2),
        _op(_EQUAL, 0, 0, 1),
        _op(_RETURN, _ALLOW),
        _refuse(errno.EAFNOSUPPORT),
    ]
