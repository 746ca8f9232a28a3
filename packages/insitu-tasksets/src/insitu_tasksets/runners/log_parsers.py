"""Parsers of test logs (docs/internals/grading.md): one generator of (name, outcome) per format.

An id with two outcomes has failed. Outcomes are PASSED, FAILED, ERROR, SKIPPED, XFAIL, XPASS, NOTRUN. Names
are yielded as they stand; `_NORMAL` strips what the runner adds to them, such as a duration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from insitu_tasksets.runners import pytest_logs
from insitu_tasksets.runners.pytest_logs import (
    ERROR,
    FAILED,
    PASSED,
    SKIPPED,
    XFAIL,
    XPASS,
    Outcomes,
    is_cut,
    merged,
)

Parser = Callable[[list[str]], Outcomes]

MAX_LINE = 4096
"""Longest line that may name a test, except in JSON: the candidate writes the log, and patterns take time."""
_ANSI = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # titles and links
    r"|\x1b[PX^_][^\x1b\n]*\x1b\\"
    r"|\x1b[ -/]*[0-~]"  # character sets and others
)
_DURATION = re.compile(r"[\[(]\s*\d+(?:\.\d+)?\s*(?:m?s|sec|seconds)\s*[\])]", re.IGNORECASE)
_BARE_DURATION = re.compile(r"\s+\d+(?:\.\d+)?\s*m?s$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestLog:
    """The outcomes of a log."""

    parser: str
    outcomes: Mapping[str, str]
    """By names without what the runner adds to them."""
    written: Mapping[str, str]
    """By names as they stand in the log."""

    def outcome(self, id: str) -> str | None:
        """Return the outcome of a required id, None without one.

        A data set may have recorded an id with the runner's additions, or cut it inside a parameter: then it
        stands for all that begin with it, if they agree.
        """
        for known, name in (
            (self.outcomes, id),
            (self.written, id),
            (self.outcomes, _NORMAL.get(self.parser, str.strip)(id)),
        ):
            if name in known:
                return known[name]
        if not is_cut(id):
            return None
        found = {outcome for name, outcome in self.outcomes.items() if name.startswith(id)}
        if found <= {PASSED, XFAIL}:
            return PASSED if PASSED in found else XFAIL if found else None
        return found.pop() if len(found) == 1 else FAILED


def parse_log(parser: str, log: str) -> TestLog:
    """Read a log; escape codes are removed."""
    lines = _ANSI.sub("", log).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if parser not in _JSON:
        lines = [line for line in lines if len(line) <= MAX_LINE]
    pairs = list(PARSERS[parser](lines))
    normal = _NORMAL.get(parser, str.strip)
    return TestLog(
        parser=parser,
        outcomes=merged((normal(name), outcome) for name, outcome in pairs),
        written=merged(pairs),
    )


def _untimed(name: str) -> str:
    """Strip one duration in brackets from the end."""
    name = name.strip()
    at = max(name.rfind("("), name.rfind("["))
    return name[:at].rstrip() if at > 0 and _DURATION.fullmatch(name, at) else name


def _bare_untimed(name: str) -> str:
    """Strip one duration without brackets."""
    name = name.strip()
    found = _BARE_DURATION.search(name, max(0, len(name) - 32))
    return name[: found.start()] if found and found.start() else name


def _any_untimed(name: str) -> str:
    return _bare_untimed(name) if _untimed(name) == name.strip() else _untimed(name)


_DJANGO = re.compile(r"(.*) \.\.\. ?(.*)")
_SUBTEST = re.compile(r"(\S+ \([^)]*\)) [\[(].*")
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
            if part := _SUBTEST.fullmatch(head[2]):
                yield part[1], _DJANGO_WORDS[head[1]]
        elif match and match[1]:
            # Behind a test of which a part failed there is no outcome and no end of the line.
            last = match[1].rpartition(" ... ")[2]
            outcome = _django_word(match[2])
            waiting = "" if outcome else last
            if outcome:
                yield from ((name, outcome) for name in dict.fromkeys((match[1], last)))
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


_GO = re.compile(r"--- (PASS|FAIL|SKIP): (\S+(?: \(\d[\d.]*m?s\))?)")


def _go(lines: list[str]) -> Outcomes:
    """Parse `go test -v`: `--- PASS: TestName (0.00s)`, subtests indented, or behind a test's output."""
    words = {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}
    for line in lines:
        for match in _GO.finditer(line):
            if not line[: match.start()].strip() or match[2].endswith(")"):
                yield match[2], words[match[1]]


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
        match = re.fullmatch(r"test (\S.*?) \.\.\. (ok|FAILED|failed|ignored)([,( <].*)?", line.strip())
        if match:
            yield match[1], words[match[2]]


_MARKS = {
    "✓": PASSED, "✔": PASSED, "√": PASSED, "✕": FAILED, "✗": FAILED, "✖": FAILED, "\u00d7": FAILED,
    "✘": FAILED, "○": SKIPPED, "↓": SKIPPED, "✎": SKIPPED, "◌": SKIPPED, "◦": SKIPPED, "⚪": SKIPPED,
}  # fmt: skip


def _jest(lines: list[str]) -> Outcomes:
    """Parse `✓ name (3 ms)`, verbose; also vitest, whose names hold file and suites."""
    for line in lines:
        match = re.fullmatch(r"\s*([✓✔√✕✗✖\u00d7○↓✎]) (\S.*)", line)
        if match:
            outcome, name = _MARKS[match[1]], match[2].strip()
            if outcome == SKIPPED:
                name = re.sub(r"^(?:skipped|todo) ", "", name)
            yield name, outcome


_SKIPPED_WORDS = re.compile(r"\((?:skipped)\)|\[(?:skip|skipped|pending|todo)\]", re.IGNORECASE)


def _symbols(lines: list[str]) -> Outcomes:
    """Parse a mark before each name, `✔ [tag]: name (3ms)`, or words for a skipped test."""
    for line in lines:
        match = re.fullmatch(r"\s*([✓✔✕✖✘\u00d7○◌◦⚪])\s*(?:\[[^\]]*\]:)?\s*:?\s*(\S.*)", line)
        if match:
            yield match[2].strip(), _MARKS[match[1]]
        elif _SKIPPED_WORDS.search(line):
            name = _SKIPPED_WORDS.sub("", line).strip()
            if name:
                yield name, SKIPPED


def _jest_json(lines: list[str]) -> Outcomes:
    """Parse `--json`: fullName of every assertion; or lines made of them, `[PASSED] name`."""
    for line in lines:
        made = re.fullmatch(r"\[(PASSED|FAILED)\] (\S.*)", line.strip()[:MAX_LINE])
        if made:
            yield made[2], made[1]
    words = {"passed": PASSED, "failed": FAILED, "pending": SKIPPED, "todo": SKIPPED, "skipped": SKIPPED}
    for report in _objects(lines):
        results = report.get("testResults")
        for result in results if isinstance(results, list) else ():
            checks = result.get("assertionResults") if isinstance(result, Mapping) else None
            for check in checks if isinstance(checks, list) else ():
                if isinstance(check, Mapping) and isinstance(check.get("fullName"), str):
                    yield str(check["fullName"]), words.get(str(check.get("status")), FAILED)


def _mocha(lines: list[str]) -> Outcomes:
    """Parse the spec reporter, `✔ name (3ms)`, `1) name` (`✖ name` by Node), `- name`, up to its summary."""
    for line in lines:
        if re.fullmatch(r"\s*\d+ (passing|failing|pending)\b.*", line):
            return
        match = re.fullmatch(r"\s+([✓✔√✕✗✖\u00d7]|\d+\)|-) (\S.*)", line)
        if match:
            outcome = _MARKS.get(match[1]) or (SKIPPED if match[1] == "-" else FAILED)
            yield match[2].strip(), outcome


_TAP_DIRECTIVE = re.compile(r"\s#\s*(\w+)")


def _tap(lines: list[str]) -> Outcomes:
    """Parse `ok 1 - name`, `not ok 2 - name`, with the directives SKIP and TODO."""
    for line in lines:
        match = re.fullmatch(r"\s*(not )?ok\b\s*\d*\s*(.*)", line)
        if match and _tap_name(match[2]):
            outcome = FAILED if match[1] else PASSED
            directive = _TAP_DIRECTIVE.search(match[2])
            word = directive[1].upper() if directive else ""
            if word.startswith("SKIP"):
                outcome = SKIPPED
            elif word == "TODO":
                outcome = XFAIL if match[1] else XPASS
            yield match[2].strip(), outcome


def _tap_name(text: str) -> str:
    """Strip the dash, the directive and a duration."""
    return _untimed(f" {text}".split(" #")[0].strip().removeprefix("-"))


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


_GRADLE = re.compile(r"(\S.* > .*\S)\s+(PASSED|FAILED|SKIPPED)(?:\s*\(.*\))?")
_GRADLE_GLUED = re.compile(r"(\S.*? > .*?\S)\s+(PASSED|FAILED|SKIPPED)(?=\W|[A-Z][a-z])")
_GRADLE_OUTPUT = (" STANDARD_OUT", " STANDARD_ERROR", " STANDARD_ERR", " STARTED")


def _gradle(lines: list[str]) -> Outcomes:
    """Parse Gradle with test logging: `Class > method() PASSED`.

    Output of another process may stand behind the outcome, or between it and the name.
    """
    waiting: list[str] = []
    for line in lines:
        text = line.strip()
        match = None if text.startswith(">") else _GRADLE.fullmatch(text) or _GRADLE_GLUED.match(text)
        if match:
            yield match[1], match[2]
            waiting = []
        elif text in (PASSED, FAILED, SKIPPED):
            yield from ((name, text) for name in waiting)
            waiting = []
        elif " > " in text and not text.startswith(">") and not text.endswith(_GRADLE_OUTPUT):
            # Where the name ends is unknown if other output follows it.
            at = text.find(")", text.find("("))
            waiting = list(dict.fromkeys([text, text[: at + 1]] if "(" in text else [text]))


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
    "matplotlib": pytest_logs.matplotlib,
    "tests_json": _tests_json,
    "pytest": pytest_logs.summary,
    "pytest_v2": pytest_logs.verbose,
    "pytest_verbose": pytest_logs.verbose,
    "pytest_options": pytest_logs.options,
    "r2e": pytest_logs.r2e,
    "seaborn": pytest_logs.verbose,
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
_JSON = frozenset({"tests_json", "go_json", "jest_json"})
"""Parsers of logs with long lines."""
_NORMAL: Mapping[str, Callable[[str], str]] = {
    **dict.fromkeys(("go", "jest", "mocha"), _untimed),
    "cargo": lambda name: _untimed(name).removesuffix(" - should panic"),
    "vitest": _bare_untimed,
    "js_4": _any_untimed,
    "tap": _tap_name,
}
"""What a runner adds to names, by parser; blanks around them elsewhere."""
