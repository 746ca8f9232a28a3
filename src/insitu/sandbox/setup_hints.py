"""Hints for a machine that refuses namespaces: one reason, one command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
        return "install bubblewrap"
    for name, refusing, hint in _SWITCHES:
        if sysctl(name) == refusing:
            return hint
    return _CONTAINER if container() else "the kernel or a security module refuses namespaces to this user"
