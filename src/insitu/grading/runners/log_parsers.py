"""Parsers of test logs (decision 0103): one generator of (id, outcome) per format.

In the result of `read_log` an id with two outcomes has failed. Outcomes are PASSED, FAILED, ERROR, SKIPPED,
XFAIL, XPASS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping

PASSED, FAILED, ERROR, SKIPPED, XFAIL, XPASS = "PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"
Outcomes = Iterator[tuple[str, str]]
Parser = Callable[[list[str]], Outcomes]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_TIME = re.compile(r"\s*[\[(]\s*\d+(\.\d+)?\s*(m?s|ms|sec|seconds)\s*[\])]$", re.IGNORECASE)
_BARE_TIME = re.compile(r"\s+\d+(\.\d+)?\s*m?s$")


def read_log(parser: str, log: str) -> dict[str, str]:
    """Return id -> outcome; escape codes and durations are stripped from ids."""
    found: dict[str, str] = {}
    lines = _ANSI.sub("", log).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for name, outcome in PARSERS[parser](lines):
        before = found.setdefault(name, outcome)
        if before != outcome:
            found[name] = ERROR if ERROR in (before, outcome) else FAILED
    return found


def _untimed(name: str) -> str:
    return _TIME.sub("", name.strip()).strip()


_SUMMARY = re.compile(r"(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S.*)")
_VERBOSE = re.compile(r"(\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: \(.*\))?(?:\s+\[\s*\d+%\])?\s*")


def _pytest_summary(lines: list[str]) -> Outcomes:
    """Parse the short test summary, `-rA`. A reason follows ` - `; skipped tests are listed without ids."""
    for line in lines:
        match = _SUMMARY.fullmatch(line.rstrip())
        if match:
            yield (match[2] if match[1] == PASSED else _unreasoned(match[2])).strip(), match[1]


def _unreasoned(text: str) -> str:
    """Strip the reason from an id; a parameter may contain the separator."""
    bracket, cut = text.find("["), text.find(" - ")
    if -1 < bracket < cut:
        end = text.find("] - ", bracket)
        return text[: end + 1] if end >= 0 else text
    return text[:cut] if cut >= 0 else text


def _pytest_verbose(lines: list[str]) -> Outcomes:
    """Parse `-v` output, and the short summary where present."""
    for line in lines:
        match = _VERBOSE.fullmatch(line)
        if match and "::" in match[1] and not match[1].startswith((PASSED, FAILED, ERROR)):
            yield match[1], match[2]
    yield from _pytest_summary(lines)


def _pytest_options(lines: list[str]) -> Outcomes:
    """Parse as pytest, with a path in a parameter cut to its last part."""
    for name, outcome in _pytest_summary(lines):
        head, bracket, rest = name.partition("[")
        option = rest.removesuffix("]")
        if bracket and option.startswith("/") and not option.startswith("//") and "*" not in option:
            name = f"{head}[/{option.rsplit('/', 1)[-1]}]"
        yield name, outcome


def _pytest_r2e(lines: list[str]) -> Outcomes:
    """Parse as pytest, with ids without the file: Class.test."""
    for name, outcome in _pytest_summary(lines):
        yield ".".join(name.split("::")[1:]) or name, outcome


_DJANGO = re.compile(r"(.*?) \.\.\. ?(.*)")
_DJANGO_WORDS = {
    "ok": PASSED, "OK": PASSED, "FAIL": FAILED, "ERROR": ERROR,
    "expected failure": XFAIL, "unexpected success": XPASS,
}  # fmt: skip


def _django(lines: list[str]) -> Outcomes:
    """Parse verbose unittest lines, `test (module.Class) ... ok`, and the lists of failures at the end."""
    # Output of a test may push the outcome to a later line of its own.
    waiting = ""
    for line in lines:
        text = line.strip()
        match = _DJANGO.fullmatch(text)
        head = re.fullmatch(r"(FAIL|ERROR): (\S.*)", text)
        if head:
            yield head[2], _DJANGO_WORDS[head[1]]
        elif match and match[1]:
            outcome = _django_word(match[2])
            waiting = "" if outcome else match[1]
            if outcome:
                yield match[1], outcome
        elif waiting and _django_word(text):
            yield waiting, _django_word(text)
            waiting = ""


def _django_word(text: str) -> str:
    return SKIPPED if text.startswith("skipped") else _DJANGO_WORDS.get(text, "")


_SYMPY = {"ok": PASSED, "F": FAILED, "E": ERROR, "f": XFAIL, "X": XPASS, "s": SKIPPED}


def _sympy(lines: list[str]) -> Outcomes:
    """Parse `test_name ok`, and underlined headings of failures, `file.py:test_name`."""
    for line in lines:
        match = re.fullmatch(r"(test_\w+)\s+(ok|F|E|f|X|s)(\s+\[\w+\])?", line.strip())
        failure = re.fullmatch(r"_+ \S+\.py:(test_\w+) _+", line.strip())
        if match:
            yield match[1], _SYMPY[match[2]]
        elif failure:
            yield failure[1], FAILED


def _go(lines: list[str]) -> Outcomes:
    """Parse `go test -v`: `--- PASS: TestName (0.00s)`, subtests indented."""
    for line in lines:
        match = re.fullmatch(r"\s*--- (PASS|FAIL|SKIP): (\S.*)", line)
        if match:
            yield _untimed(match[2]), {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}[match[1]]


def _go_json(lines: list[str]) -> Outcomes:
    """Parse `go test -json`; an id is package/test."""
    words = {"pass": PASSED, "fail": FAILED, "skip": SKIPPED}
    for event in _objects(lines):
        test, action = event.get("Test"), event.get("Action")
        if isinstance(test, str) and isinstance(action, str) and action in words:
            yield f"{event.get('Package', '')}/{test}".lstrip("/"), words[action]


def _cargo(lines: list[str]) -> Outcomes:
    """Parse `test path::name ... ok`."""
    words = {"ok": PASSED, "FAILED": FAILED, "ignored": SKIPPED, "failed": FAILED}
    for line in lines:
        match = re.fullmatch(r"test (\S.*?) \.\.\. (ok|FAILED|failed|ignored)(,.*)?", _untimed(line))
        if match:
            yield match[1].removesuffix(" - should panic"), words[match[2]]


_MARKS = {
    "✓": PASSED, "✔": PASSED, "√": PASSED, "✕": FAILED, "✗": FAILED, "✖": FAILED, "\u00d7": FAILED,
    "✘": FAILED, "○": SKIPPED, "↓": SKIPPED, "✎": SKIPPED, "◌": SKIPPED, "◦": SKIPPED, "⚪": SKIPPED,
}  # fmt: skip


def _jest(lines: list[str]) -> Outcomes:
    """Parse `✓ name (3 ms)`, verbose; also vitest, whose names hold file and suites."""
    for line in lines:
        match = re.fullmatch(r"\s*([✓✔√✕✗✖\u00d7○↓✎]) (?:skipped |todo )?(\S.*)", line)
        if match:
            yield _BARE_TIME.sub("", _untimed(match[2])), _MARKS[match[1]]


_SKIPPED_WORDS = re.compile(r"\((?:skipped)\)|\[(?:skip|skipped|pending|todo)\]", re.IGNORECASE)


def _symbols(lines: list[str]) -> Outcomes:
    """Parse a mark before each name, `✔ [tag]: name (3ms)`, or words for a skipped test."""
    for line in lines:
        match = re.fullmatch(r"\s*([✓✔✕✖✘\u00d7○◌◦⚪])\s*(?:\[[^\]]*\]:)?\s*:?\s*(\S.*)", line)
        if match:
            yield _BARE_TIME.sub("", _untimed(match[2])), _MARKS[match[1]]
        elif _SKIPPED_WORDS.search(line):
            name = _BARE_TIME.sub("", _untimed(_SKIPPED_WORDS.sub("", line)))
            if name:
                yield name, SKIPPED


def _jest_json(lines: list[str]) -> Outcomes:
    """Parse `--json`: fullName of every assertion."""
    words = {"passed": PASSED, "failed": FAILED, "pending": SKIPPED, "todo": SKIPPED, "skipped": SKIPPED}
    for report in _objects(lines):
        results = report.get("testResults")
        for result in results if isinstance(results, list) else ():
            checks = result.get("assertionResults") if isinstance(result, Mapping) else None
            for check in checks if isinstance(checks, list) else ():
                if isinstance(check, Mapping) and isinstance(check.get("fullName"), str):
                    yield str(check["fullName"]), words.get(str(check.get("status")), FAILED)


def _mocha(lines: list[str]) -> Outcomes:
    """Parse the spec reporter, `✔ name (3ms)`, `1) name`, `- name`, up to its summary."""
    for line in lines:
        if re.fullmatch(r"\s*\d+ (passing|failing|pending)\b.*", line):
            return
        match = re.fullmatch(r"\s+([✓✔√]|\d+\)|-) (\S.*)", line)
        if match:
            outcome = _MARKS.get(match[1]) or (SKIPPED if match[1] == "-" else FAILED)
            yield _untimed(match[2]), outcome


def _tap(lines: list[str]) -> Outcomes:
    """Parse `ok 1 - name`, `not ok 2 - name`, with the directives SKIP and TODO."""
    for line in lines:
        match = re.fullmatch(r"\s*(not )?ok\b\s*\d*\s*-?\s*([^#]*?)\s*(?:#\s*(\w+).*)?", line)
        if match and match[2]:
            word = (match[3] or "").upper()
            outcome = FAILED if match[1] else PASSED
            if word.startswith("SKIP"):
                outcome = SKIPPED
            elif word == "TODO":
                outcome = XFAIL if match[1] else XPASS
            yield _untimed(match[2]), outcome


def _gtest(lines: list[str]) -> Outcomes:
    """Parse googletest: `[       OK ] Suite.Test (1 ms)`."""
    words = {"OK": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED}
    for line in lines:
        match = re.fullmatch(r"\[ +(OK|FAILED|SKIPPED) +\] ([\w./]+\.[\w./]+).*", line.strip())
        if match:
            yield match[2], words[match[1]]


def _ctest(lines: list[str]) -> Outcomes:
    """Parse CTest: `1/3 Test #1: name ....   Passed    0.01 sec`."""
    for line in lines:
        match = re.fullmatch(r"\s*\d+/\d+ +Test +#\d+: (\S+) \.*[ *]*(\w[\w ]*?) +[\d.]+ sec.*", line)
        if match:
            yield match[1], PASSED if match[2] == "Passed" else SKIPPED if "Not Run" in match[2] else FAILED


def _gradle(lines: list[str]) -> Outcomes:
    """Parse Gradle with test logging: `Class > method() PASSED`."""
    for line in lines:
        match = re.fullmatch(r"(\S.* > \S.*) (PASSED|FAILED|SKIPPED)", line.strip())
        if match:
            yield match[1], match[2]


def _minitest(lines: list[str]) -> Outcomes:
    """Parse verbose minitest: `Class#test_name = 0.00 s = .`."""
    words = {".": PASSED, "F": FAILED, "E": ERROR, "S": SKIPPED}
    for line in lines:
        match = re.fullmatch(r"(\S.*#\S.*?) = [\d.]+ s = ([.FES])", line.strip())
        if match:
            yield match[1], words[match[2]]


def _objects(lines: list[str]) -> Iterator[Mapping[str, object]]:
    """Yield JSON objects, one per line; else all lines as one object."""
    alone = [line for line in lines if line.startswith("{") and line.rstrip().endswith("}")]
    for line in alone or ["\n".join(lines)]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _matplotlib(lines: list[str]) -> Outcomes:
    """Parse as pytest, with two enum members as numbers, as newer versions of Python print them."""
    for name, outcome in _pytest_summary(lines):
        yield name.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"), outcome


def _tests_json(lines: list[str]) -> Outcomes:
    """Parse the JSON {"tests": [{"name", "status"}]} of a data set's own parser."""
    try:
        tests = json.loads("\n".join(lines))["tests"]
        pairs = [(test["name"], test["status"]) for test in tests]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    for name, status in pairs:
        if isinstance(name, str) and isinstance(status, str):
            yield name, status.upper()


PARSERS: Mapping[str, Parser] = {
    "matplotlib": _matplotlib,
    "tests_json": _tests_json,
    "pytest": _pytest_summary,
    "pytest_v2": _pytest_verbose,
    "pytest_verbose": _pytest_verbose,
    "pytest_options": _pytest_options,
    "r2e": _pytest_r2e,
    "seaborn": _pytest_verbose,
    "django": _django,
    "unittest": _django,
    "sympy": _sympy,
    "go": _go,
    "go_json": _go_json,
    "cargo": _cargo,
    "jest": _jest,
    "jest_json": _jest_json,
    "js_4": _symbols,
    "vitest": _jest,
    "mocha": _mocha,
    "tap": _tap,
    "gtest": _gtest,
    "ctest": _ctest,
    "gradle": _gradle,
    "minitest": _minitest,
}
