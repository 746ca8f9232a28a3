"""The seccomp filter of a sandbox, as a BPF program that PID 1 installs.

Refused: reading or controlling another process of the same user, the kernel's key rings (`wipe` cannot empty
them), sockets outside of the network namespace (a hypervisor's), new user namespaces, and interfaces mostly
known from exploits. All sandboxes share files of the machine, so calls that reveal or change the page cache
would be a covert channel: they are refused or ignored. A refused call returns an error. All calls of another
architecture are refused.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping

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
"""Calls refused unless this argument is 0, the caller: a lowered limit or priority of a warm agent would
persist into its next rollout."""


_NUMBERS: Mapping[str, tuple[int, int]] = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "clone3": (435, 435), "cachestat": (451, 451),
    "ptrace": (101, 117), "kcmp": (312, 272), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "setns": (308, 268),
    "unshare": (272, 97), "clone": (56, 220), "socket": (41, 198), "socketpair": (53, 199),
    "prlimit64": (302, 261), "setpriority": (141, 140), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "io_setup": (206, 0), "mincore": (27, 232), "madvise": (28, 233),
    "fadvise64": (221, 223), "preadv2": (327, 286), "pwritev2": (328, 287),
}  # fmt: skip
"""System call -> numbers on x86_64 and aarch64."""
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of the kernel."""
MADV_COLD, MADV_PAGEOUT = 20, 21
RWF_FLAGS = 5
"""Argument of `preadv2` with the flags: RWF_NOWAIT and others reveal or change the page cache."""
_UNKNOWN = ("clone3", "mincore", "cachestat", "io_setup")
"""Calls that fail as on a kernel without them, for which callers have a fallback. Flags of `clone3` and
`io_submit` lie in memory, where a filter cannot read them."""
_NEVER = (
    "ptrace", "kcmp", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise",
    "add_key", "request_key", "keyctl",
    "io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd", "setns",
)  # fmt: skip


def program(machine: str) -> bytes:
    """Return the filter for `platform.machine()`; empty for an unknown machine."""
    if machine not in _AUDIT:
        return b""
    numbers = call_numbers(machine)
    code = [_op(_LOAD, _ARCH), _op(_EQUAL, _AUDIT[machine], 1, 0), _refuse(errno.EPERM), _op(_LOAD, _NUMBER)]
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
        code += _for(numbers[name], _socket_rules())
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def call_numbers(machine: str) -> dict[str, int]:
    return {name: pair[machine == "aarch64"] for name, pair in _NUMBERS.items()}


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction; `yes` and `no`: how many instructions to skip."""
    return struct.pack("<HBBI", code, yes, no, value)


def _refuse(number: int) -> bytes:
    return _op(_RETURN, _ERROR | number)


_REFUSE_OR_ALLOW = (_refuse(errno.EPERM), _op(_RETURN, _ALLOW))


def _argument(place: int) -> bytes:
    """Return the load of the lower half of an argument, which is all that the kernel reads of it."""
    return _op(_LOAD, _ARGUMENTS + 8 * place)


def _for(number: int, body: list[bytes]) -> list[bytes]:
    """Return the rule for one call. `body` must return: it overwrites the register of the call number."""
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _socket_rules() -> list[bytes]:
    """Allow local and internet sockets, and the netlink protocol that lists addresses."""
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
