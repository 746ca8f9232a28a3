"""PID 1 of a sandbox: drops every privilege, then starts and kills processes on orders over one socket.

It imports little: `signal`, `socket` and `contextlib` would double its start-up time. It is init and not
dumpable, so no process in the sandbox can kill or trace it. It exits when the host closes the socket.

Frames from the host: 4 bytes length, then NUL-joined fields `kind, job, ...`, descriptors on the first byte.
Lines to the host: `ready`, `exit JOB CODE` (-n for signal n), `swept JOB NUMBER`. With a root setup it starts
as root with the container's capabilities: only the order `root` runs as root, any other one drops root first.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import struct
import sys
import time
from _socket import (
    AF_INET,
    AF_UNIX,
    CMSG_SPACE,
    MSG_CMSG_CLOEXEC,
    MSG_WAITALL,
    SCM_RIGHTS,
    SOCK_CLOEXEC,
    SOCK_STREAM,
    SOL_SOCKET,
    socket,
)  # fmt: skip

SIGINT, SIGKILL, SIGPIPE, SIGXFSZ, SIG_DFL = 2, 9, 13, 25, 0
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
CLONE_NEWUSER = 0x10000000
ADDR_NO_RANDOMIZE = 0x40000
OPEN_FILES = (1024, 4096)
"""Limits of jobs. This process may open more: the kernel refuses to send descriptors while more are in
flight, per user, than the sender may open."""
IPC_RMID = 0
SWEEP_S = 1.0
ROOT_S = 5.0
OWN_SCORE, JOB_SCORE = b"900", b"1000"
INSIDE_ID = 1000


def system(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _drop_bounding_set(libc: ctypes.CDLL) -> None:
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers that the kernel has not


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0)
    system(libc.capset(header, data))


def _drop_privileges(libc: ctypes.CDLL, outer_id: int) -> None:
    """Become `outer_id`, enter a user namespace as INSIDE_ID and drop all capabilities."""
    os.setgroups([])
    os.setresgid(outer_id, outer_id, outer_id)
    os.setresuid(outer_id, outer_id, outer_id)
    # After setresuid the process is not dumpable, and its map files belong to root.
    system(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
    system(libc.unshare(CLONE_NEWUSER))
    for name, text in (
        ("setgroups", "deny"),
        ("gid_map", f"{INSIDE_ID} {outer_id} 1"),
        ("uid_map", f"{INSIDE_ID} {outer_id} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)
    _drop_bounding_set(libc)
    _drop_capabilities(libc)


def _give_up_root(libc: ctypes.CDLL, user: int, group: int) -> None:
    """Become the container's user without capabilities; exit if any is left."""
    _drop_bounding_set(libc)
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    _drop_capabilities(libc)
    system(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    system(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
    with open("/proc/self/status", "rb") as file:
        left = [line for line in file if line.startswith(b"Cap") and int(line.split()[1], 16)]
    if left or os.getresuid() != (user,) * 3 or os.getresgid() != (group,) * 3 or os.getgroups():
        os._exit(1)


def _confine(libc: ctypes.CDLL, outer_id: int, processes: int, memory: int, refused: bytes) -> int:
    """Drop all privileges, with the seccomp filter `refused`; return the descriptor of OOM scores."""
    scores = _prefer_as_oom_victim()
    if outer_id >= 0:
        _drop_privileges(libc, outer_id)
    system(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    system(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    system(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
    # Python's own SIGINT handler would let any process interrupt init.
    libc.signal(SIGINT, SIG_DFL)
    # Printed addresses are the same in every rollout. Some containers do not allow it.
    libc.personality(ADDR_NO_RANDOMIZE)
    limit(resource.RLIMIT_CORE, 0, 0)
    # RLIMIT_MSGQUEUE: POSIX message queues outlive a rollout and cannot be listed from inside.
    limit(12, 0, 0)
    if processes:
        limit(resource.RLIMIT_NPROC, processes, processes)
    if memory:
        limit(resource.RLIMIT_DATA, memory, memory)
    if refused:
        program = ctypes.create_string_buffer(refused, len(refused))
        header = struct.pack("@HP", len(refused) // 8, ctypes.addressof(program))
        system(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0))
    return scores


def limit(kind: int, soft: int, hard: int) -> None:
    """Lower a limit; never raise it."""
    now = resource.getrlimit(kind)[1]
    most = hard if now == resource.RLIM_INFINITY else min(hard, now)
    resource.setrlimit(kind, (min(soft, most), most))


def _prefer_as_oom_victim() -> int:
    """Make jobs the first victims of the OOM killer, before PID 1; return a descriptor for scores, or -1."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, OWN_SCORE)
    except OSError:
        return -1  # forbidden in some containers
    return fd


class _Supervisor:
    def __init__(self, control: socket, libc: ctypes.CDLL, scores: int, later: tuple[int, ...] = ()) -> None:
        """`later`: user and group to become before any order but `root`."""
        self.control = control
        self.later = later
        self.libc = libc
        self.scores = scores
        self.poll = select.poll()
        self.jobs: dict[int, str] = {}
        self.watched: dict[int, int] = {}
        self.kept: set[int] = set()
        self.used = 0.0  # CPU seconds of ended processes

    def send(self, line: str, fds: tuple[int, ...] = ()) -> None:
        rights = [(SOL_SOCKET, SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        self.control.sendmsg([line.encode() + b"\n"], rights)

    def receive(self) -> tuple[list[str], list[int]]:
        flags = MSG_CMSG_CLOEXEC | MSG_WAITALL
        head, extra, _, _ = self.control.recvmsg(4, CMSG_SPACE(16), flags)
        fds: list[int] = []
        for _level, _kind, data in extra:
            fds += struct.unpack(f"{len(data) // 4}i", data)
        if len(head) < 4:
            os._exit(0)
        (size,) = struct.unpack("<I", head)
        body = bytearray()
        while len(body) < size:
            chunk = self.control.recv(size - len(body))
            if not chunk:
                os._exit(0)
            body += chunk
        return [os.fsdecode(part) for part in bytes(body).split(b"\0")], fds

    def serve(self) -> None:
        """Poll for orders and ends of jobs; once a second reap orphans."""
        self.poll.register(self.control.fileno(), select.POLLIN)
        while True:
            for fd, _ in self.poll.poll(1000):
                if fd == self.control.fileno():
                    self.handle(*self.receive())
            self.reap()

    def handle(self, fields: list[str], fds: list[int]) -> None:
        kind, job = fields[0], fields[1]
        if self.later and kind != "root":
            self.end_root()
        if kind == "root" and not self.later:
            os.write(fds[2], b"root has ended\n")
            self.send(f"exit {job} 126")
            _close_all(fds)
        elif kind in ("run", "keep", "root"):
            argc = int(fields[3])
            env = dict(item.split("=", 1) for item in fields[4 + argc :] if item)
            self.start(job, fields[2], fields[4 : 4 + argc], env, fds, kind == "keep")
        elif kind == "kill":
            self.sweep(job, self.trees({pid for pid, name in self.jobs.items() if name != fields[2]}))
        elif kind == "sweep":
            self.sweep(job, {pid for pid in self.kept if pid in self.jobs})
        elif kind == "cpu":
            self.send(f"swept {job} {self.cpu_ms()}")
        elif kind in ("ipc", "user"):
            if kind == "ipc":
                self.clear_ipc()
            self.send(f"swept {job} 1")

    def start(
        self, job: str, cwd: str, argv: list[str], env: dict[str, str], fds: list[int], keep: bool
    ) -> None:
        try:
            self.score(JOB_SCORE)
            pid = os.fork()
        except OSError as error:
            os.write(fds[2], f"cannot start a process: {error.strerror}\n".encode())
            self.send(f"exit {job} 126")
            pid = -1
        if pid == 0:
            become(self.libc, cwd, argv, env, fds)
        self.score(OWN_SCORE)
        _close_all(fds)
        if pid > 0:
            self.jobs[pid] = job
            self.watched[pid] = os.pidfd_open(pid)
            self.poll.register(self.watched[pid], select.POLLIN)
            if keep:
                self.kept.add(pid)

    def end_root(self) -> None:
        """Kill root's processes and drop root; exit on failure, which ends the sandbox."""
        deadline = time.monotonic() + ROOT_S
        while True:
            try:
                os.kill(-1, SIGKILL)
            except ProcessLookupError:
                break  # no process left
            if time.monotonic() > deadline:
                os._exit(1)
            self.reap()
            time.sleep(0.0005)
        user, group = self.later
        self.later = ()
        _give_up_root(self.libc, user, group)

    def score(self, value: bytes) -> None:
        """Set the OOM score, which a child inherits."""
        if self.scores >= 0:
            os.write(self.scores, value)

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.used += usage.ru_utime + usage.ru_stime
            job = self.jobs.pop(pid, None)
            self.kept.discard(pid)
            if job is not None:
                self.poll.unregister(self.watched[pid])
                os.close(self.watched.pop(pid))
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                self.send(f"exit {job} {code}")

    def cpu_ms(self) -> int:
        """Return the CPU time of all processes, this one excluded."""
        self.reap()
        ticks = 0
        for pid in self.living():
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    ticks += sum(int(part) for part in file.read().rpartition(b")")[2].split()[11:15])
            except OSError:
                continue
        return int(1000 * (self.used + ticks / os.sysconf("SC_CLK_TCK")))

    def living(self) -> dict[int, int]:
        """Return pid -> parent of every other process that is alive."""
        # A process whose main thread has exited shows as zombie while other threads run.
        found = {}
        for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib would double the start-up time
            if not name.isdigit() or name == "1":
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                dead = state in b"ZX" and len(os.listdir(f"/proc/{name}/task")) < 2  # noqa: PTH208
            except OSError:
                continue
            if not dead:
                found[int(name)] = int(parent)
        return found

    def trees(self, roots: set[int]) -> set[int]:
        parents = self.living()
        known, fresh = set(roots), set(roots)
        while fresh:
            fresh = {pid for pid, parent in parents.items() if parent in fresh} - known
            known |= fresh
        return known

    def sweep(self, job: str, keep: set[int]) -> None:
        """Kill all processes but `keep`; after SWEEP_S all of them, and answer 0."""
        # kill(-1) holds the process table, so no child of a fork bomb escapes it.
        deadline = time.monotonic() + SWEEP_S
        while True:
            self.reap()
            targets = self.living().keys() - keep
            if not targets:
                break
            spared = time.monotonic() < deadline
            # Jobs first: a shell that sees its child die would go on, and might exit 0.
            for pid in sorted(targets, key=lambda pid: pid not in self.jobs) if spared else (-1,):
                try:
                    os.kill(pid, SIGKILL)
                except ProcessLookupError:
                    continue
            if not spared:
                keep = set()
            time.sleep(0.0005)
        self.reap()
        self.send(f"swept {job} {int(time.monotonic() < deadline)}")

    def clear_ipc(self) -> None:
        """Remove System V shared memory, queues and semaphores, which outlive processes."""
        for name in ("shm", "msg", "sem"):
            try:
                with open(f"/proc/sysvipc/{name}") as file:
                    ids = [int(row.split()[1]) for row in file.readlines()[1:]]
            except OSError:
                continue
            remove = getattr(self.libc, f"{name}ctl")
            for number in ids:
                remove(number, 0, IPC_RMID) if name == "sem" else remove(number, IPC_RMID, None)


def become(libc: ctypes.CDLL, cwd: str, argv: list[str], env: dict[str, str], fds: list[int]) -> None:
    """Execute the job in the forked child; exit with 126 or 127 on failure, as a shell does."""
    code = 126
    try:
        os.setsid()
        for number in (SIGPIPE, SIGXFSZ):  # ignored by Python, and inherited
            libc.signal(number, SIG_DFL)
        soft, hard = OPEN_FILES
        limit(resource.RLIMIT_NOFILE, soft, min(hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2))
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.chdir(cwd)
        code = 127
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"{cwd if code == 126 else argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(code)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _control_socket(place: str) -> socket:
    """Return the inherited socket, or connect to a path."""
    if place.startswith("/"):
        control = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
        control.connect(place)
        return control
    os.set_inheritable(int(place), False)
    return socket(fileno=int(place))


def main(arguments: list[str]) -> None:
    """Confine this process, send `ready` with descriptors of the writable folders, and serve.

    Arguments: control descriptor or path of its socket, gateway port (0 = none), outer id (-1 = not root),
    processes, memory, seccomp filter as hex digits, UID:GID to become later or "", the writable folders.
    """
    port, outer_id, processes, memory = (int(item) for item in arguments[1:5])
    refused, places = bytes.fromhex(arguments[5]), arguments[7:]
    later = tuple(int(number) for number in arguments[6].split(":")) if arguments[6] else ()
    libc = ctypes.CDLL(None, use_errno=True)
    control = _control_socket(arguments[0])
    fds = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for folder in places]
    if outer_id >= 0:
        for folder in fds:
            os.fchown(folder, outer_id, outer_id)
    supervisor = _Supervisor(control, libc, _confine(libc, outer_id, processes, memory, refused), later)
    if port:
        listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        fds.append(listener.fileno())
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):  # standard error led to the host during start-up
        os.dup2(null, number)
    supervisor.send("ready", tuple(fds))
    _close_all(fds[: len(places)])
    supervisor.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
