"""Runs one test file with pytest inside the grading sandbox, as `python -s -B -c <this file>`, cwd /.

Reads one Python literal from stdin: root, bundle, target, conftests, nonce, address_space, cpu_s. Streams
records `[nonce, seq, id, outcome]`, one JSON line each, on a private copy of stdout: first `["", "start"]`,
then every test with its outcome, then `["", "end"]`. It exits with pytest's own code. It knows neither what
is required nor which tests are controls. pytest and its own modules come from a read-only folder and are
imported before anything of the candidate, whose folder stands last on the path.
"""

import os
import sys
from _json import encode_basestring_ascii as quote

if sys.version_info < (3, 10):
    raise SystemExit("Python {}.{} in the sandbox is too old: 3.10 or newer".format(*sys.version_info))

OPTIONS = (
    "-q", "--capture=no", "--import-mode=importlib", "--color=no", "--tb=no", "--show-capture=no",
    "-p", "no:cacheprovider", "-p", "no:junitxml", "-p", "no:pastebin", "-p", "no:stepwise",
)  # fmt: skip


class _ResultPipe:
    def __init__(self, nonce: str) -> None:
        self.fd, self.nonce, self.seq = os.dup(1), nonce, 0

    def send(self, name: str, outcome: str) -> None:
        line = f"[{quote(self.nonce)},{self.seq},{quote(name)},{quote(outcome)}]\n".encode()
        self.seq += 1
        while line:
            line = line[os.write(self.fd, line) :]


class _TestRecorder:
    """A pytest plugin: sends the outcome of each test once, after all its phases."""

    def __init__(self, channel: _ResultPipe) -> None:
        self.channel = channel
        self.phases: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.phases = []

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        if report.failed:
            self.phases.append("failed" if report.when == "call" else "error")
        elif report.skipped:
            self.phases.append("xfailed" if hasattr(report, "wasxfail") else "skipped")
        elif report.when == "call":
            self.phases.append("xpassed" if hasattr(report, "wasxfail") else "passed")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        # A test with subtests has many outcomes; the worst one counts.
        order = ("error", "failed", "skipped", "xfailed", "xpassed", "passed")
        self.channel.send(nodeid, next((name for name in order if name in self.phases), "missing"))

    def pytest_collectreport(self, report) -> None:  # type: ignore[no-untyped-def]
        if report.failed:
            self.channel.send("", "uncollected")


def read_job() -> dict:  # type: ignore[type-arg]
    chunks = []
    while chunk := os.read(0, 1 << 16):
        chunks.append(chunk)
    return eval(b"".join(chunks), {"__builtins__": {}})  # type: ignore[no-any-return]


def limit(address_space: int, cpu_s: int) -> None:
    import resource

    for what, soft, hard in (
        (resource.RLIMIT_AS, address_space, address_space),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
    ):
        try:
            resource.setrlimit(what, (soft, hard))
        except (ValueError, OSError):
            continue  # the sandbox is tighter already


def _search_path(root: str, target: str) -> list:  # type: ignore[type-arg]
    """Return folders of the candidate's modules and the tests' helpers; last on sys.path."""
    folder = os.path.dirname(f"{root}/{target}")  # noqa: PTH120 - runs before anything is worth importing
    while os.path.exists(f"{folder}/__init__.py") and folder != root:  # noqa: PTH110
        folder = os.path.dirname(folder)  # noqa: PTH120
    source = [f"{root}/src"] if os.path.isdir(f"{root}/src") else []  # noqa: PTH112
    return [root, *source, *([folder] if folder != root else [])]


def planted(root: str, target: str, known: list) -> str:  # type: ignore[type-arg]
    """Return a conftest.py in a parent folder of the target that the host did not write, or ""."""
    parts = target.split("/")[:-1]
    for depth in range(len(parts) + 1):
        name = "/".join([*parts[:depth], "conftest.py"])
        if name not in known and os.path.lexists(f"{root}/{name}"):
            return name
    return ""


def main() -> None:
    sys.path[:] = [path for path in sys.path if path]
    job = read_job()
    channel = _ResultPipe(job["nonce"])
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    root, target = job["root"], job["target"]
    if planted(root, target, job["conftests"]):
        channel.send("", "planted")
        os._exit(0)
    sys.path.insert(0, job["bundle"])
    try:
        import pytest
    except BaseException as error:  # noqa: BLE001 - no test can be run
        channel.send(type(error).__name__, "unusable")
        os._exit(0)
    channel.send("", "start")
    limit(job["address_space"], job["cpu_s"])
    os.chdir(root)
    sys.path += _search_path(root, target)
    sys.argv[:] = ["pytest"]
    where = ("-c", job["bundle"] + "/insitu.ini", "--rootdir", root, "--confcutdir", root, target)
    code = int(pytest.main([*OPTIONS, *where], plugins=[_TestRecorder(channel)]))
    channel.send("", "end")
    os._exit(code)  # without atexit handlers and threads of the candidate


if __name__ == "__main__":
    main()
