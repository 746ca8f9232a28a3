"""Parsers of what pytest prints, for log_parsers.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

PASSED, FAILED, ERROR, SKIPPED, XFAIL, XPASS = "PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"
NOTRUN = "NOTRUN"
"""An expected failure that was not even run."""
Outcomes = Iterator[tuple[str, str]]


def merged(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, outcome in pairs:
        before = found.setdefault(name, outcome)
        if before != outcome:
            found[name] = ERROR if ERROR in (before, outcome) else FAILED
    return found


def is_cut(id: str) -> bool:
    """Return whether an id ends inside a parameter."""
    return id.count("[") > id.count("]")


_WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
_WORKER = re.compile(r"\[gw\d+\]\s+(?:\[\s*\d+%\]\s+)?")
"""How a line of pytest-xdist begins."""
_SUMMARY = re.compile(rf"({_WORDS})\s+(\S.*)")
_VERBOSE = re.compile(rf" ({_WORDS})(?= \(|$)")
_PROGRESS = re.compile(r"\s+\[\s*\d+%\]$")
_FOLDED = re.compile(r"\[\d+\] ")
"""Skipped tests are listed by place and number."""
_SUBTEST = "SUBFAIL"
"""pytest-subtests lists a failed part of a test apart from the test, which it says has passed."""


def summary(lines: list[str]) -> Outcomes:
    """Parse the short test summary, `-rA`. A reason follows ` - `."""
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        text = _WORKER.sub("", line.rstrip(), count=1) if line.startswith("[gw") else line.rstrip()
        match = _SUMMARY.fullmatch(text)
        if match and not (match[1] == SKIPPED and _FOLDED.match(match[2])):
            name = match[2] if match[1] == PASSED else _unreasoned(match[2])
            reason = f"{match[2][len(name) :]}{after if after.startswith('  reason:') else ''}"
            unrun = match[1] == XFAIL and "[NOTRUN]" in reason
            yield name.strip(), NOTRUN if unrun else match[1]
        elif _SUBTEST in text:
            name = _subtest(text)
            if name:
                yield name, FAILED


def _unreasoned(text: str) -> str:
    """Strip the reason from an id; a parameter may contain the separator."""
    cut = text.find(" - ")
    if cut < 0 or "[" not in text[:cut]:
        return text if cut < 0 else text[:cut]
    at = cut
    while at >= 0:
        if not is_cut(text[:at]):
            return text[:at]
        at = text.find(" - ", at + 1)
    end = text.find("] - ")
    return text[: end + 1] if end >= 0 else text


def _subtest(text: str) -> str:
    """Return the test of a line about a failed part of it; empty for another line.

    `SUBFAIL id - reason`, `SUBFAILED[what] id - reason`, `id [what] (i=0) SUBFAIL`, `id SUBFAILED[what]`.
    """
    before, _, after = text.partition(_SUBTEST)
    if before and not before.endswith(" "):
        return ""
    if "::" in before:
        words = before.split(" ")
        for n in range(1, len(words) + 1):
            name = " ".join(words[:n])
            if "::" in name and not is_cut(name):
                return name
    at = after.find("::")
    return _unreasoned(after[after.rfind(" ", 0, at) + 1 :]).strip() if at >= 0 else ""


def verbose(lines: list[str]) -> Outcomes:
    """Parse `-v` output, and the short summary where present."""
    for line in lines:
        text = _PROGRESS.sub("", line.rstrip())
        if "::" not in text or text.startswith((PASSED, FAILED, ERROR, "[gw")):
            continue
        for match in _VERBOSE.finditer(text):
            rest = text[match.end() :]
            if not rest or rest.endswith(")"):
                unrun = match[1] == XFAIL and "[NOTRUN]" in rest
                name = text[: match.start()].strip().rpartition(" <- ")[0]
                # The file that an inherited test is defined in follows its id.
                whole = is_cut(name) or not name
                yield text[: match.start()].strip() if whole else name, NOTRUN if unrun else match[1]
                break
    yield from summary(lines)


def options(lines: list[str]) -> Outcomes:
    """Parse as pytest, with a path in a parameter cut to its last part."""
    for name, outcome in summary(lines):
        head, bracket, rest = name.partition("[")
        option = rest.removesuffix("]")
        if bracket and option.startswith("/") and not option.startswith("//") and "*" not in option:
            name = f"{head}[/{option.rsplit('/', 1)[-1]}]"
        yield name, outcome


_SUMMARY_TITLE = "short test summary info"


def r2e(lines: list[str]) -> Outcomes:
    """Parse as the set does: Class.test without the file, from the first summary, without other outcomes.

    A file that is not collected has an empty name.
    """
    titles = [number for number, line in enumerate(lines) if _SUMMARY_TITLE in line]
    first, end = [*titles, len(lines), len(lines)][:2] if titles else (0, len(lines))
    found: list[tuple[str, str]] = []
    for line in lines[first:end]:
        match = re.match(r"(PASSED|FAILED|ERROR) +(\S.*)", line)
        if match:
            found.append((".".join(match[2].split("::")[1:]).strip(), match[1]))
    yield from r2e_names(merged(found)).items()


def r2e_names(outcomes: Mapping[str, str]) -> dict[str, str]:
    """Return outcomes by names that end at the first ` - `, as the set compares them: the last one counts."""
    return {name.split(" - ")[0]: outcomes[name] for name in sorted(outcomes)}


def matplotlib(lines: list[str]) -> Outcomes:
    """Parse as pytest, with two enum members as numbers, as newer versions of Python print them."""
    for name, outcome in summary(lines):
        yield name.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"), outcome
