"""All attacks and the required cell of each attack and runner (docs/internals/attack-matrix.md)."""

from __future__ import annotations

from collections.abc import Mapping

from insitu.types import Outcome
from insitu_lab.attacks.file_attacks import FILES_ATTACKS
from insitu_lab.attacks.in_process_attacks import IN_PROCESS
from insitu_lab.attacks.leak_attacks import LEAKS
from insitu_lab.attacks.model import Attack
from insitu_lab.attacks.process_attacks import LIFE
from insitu_lab.attacks.target import RUNNERS
from insitu_lab.attacks.test_attacks import TESTS
from insitu_lab.attacks.verdict_attacks import VERDICT

ATTACKS: tuple[Attack, ...] = (*TESTS, *IN_PROCESS, *VERDICT, *FILES_ATTACKS, *LEAKS, *LIFE)

_PROCESS = "the tests and the candidate share a process"
_FRAMES = f"{_PROCESS}: expected values stand in the frames that call it"
_READS = (
    "the tests are in the candidate's sandbox while they run: it can read them and hard-code what they say"
)
_SEES = f"{_PROCESS}: it can see that it is tested"
_EQUALS = f"{_PROCESS} and there are no controls: an object that equals everything satisfies an assertion"
_REPORTS = f"{_PROCESS} and there are no controls: what it reports can be patched"
_PRINTS = f"{_PROCESS} and its output: what the check prints when all is well, the candidate can print"
_CODES = f"{_PROCESS}: with the code that the check leaves with when all is well, the candidate can leave"
_FILE = "the reward is a file that the script makes in the sandbox, and so can the candidate"
RESIDUAL: Mapping[str, Mapping[int, str]] = {
    "json_io": {},
    "stdio": {},
    "pytest": {19: _SEES},
    "command": {11: _PRINTS, 15: _EQUALS, 16: _FRAMES, 17: _READS, 19: _SEES},
    "swebench_log": {
        10: _REPORTS,
        11: f"{_PROCESS} and its output: lines of a test that never ran look like any other",
        15: _EQUALS,
        16: _FRAMES,
        17: _READS,
        19: _SEES,
    },
    "harbor": {
        10: _REPORTS,
        12: _CODES,
        15: _EQUALS,
        16: _FRAMES,
        17: _READS,
        19: _SEES,
        21: _FILE,
        22: _FILE,
    },
}
"""Runner -> attack -> why a determined candidate may win."""

_WORDS = {
    Outcome.UNRESOLVED: "R0",
    Outcome.TAMPERED: "TAMPER",
    Outcome.REFUSED: "REFUSED",
    Outcome.TEST_TIMEOUT: "TIMEOUT",
}


def runners() -> tuple[str, ...]:
    """Return the runners of the matrix."""
    from insitu import registry

    return tuple(name for name in RUNNERS if name in registry.names("runners") and name in RESIDUAL)


def required(attack: Attack, runner: str) -> str:
    """Return the text of a cell: outcomes of its variants, or `residual`."""
    if attack.id in RESIDUAL[runner]:
        return "residual"
    if attack.play is not None:
        return "SAFE" if attack.id != 50 else "TAMPER"
    said = ("/".join(_WORDS[outcome] for outcome in v.allowed(runner)) for v in attack.variants)
    return ", ".join(dict.fromkeys(said))


def as_markdown() -> str:
    """Return the matrix as a table with the reasons of residual cells."""
    names = runners()
    lines = ["| # | attack | asked for | " + " | ".join(names) + " | fools |"]
    lines.append("|" + "---|" * (len(names) + 4))
    for attack in ATTACKS:
        fooled = ", ".join(dict.fromkeys(v.naive for v in attack.variants if v.naive is not None))
        cells = [required(attack, name) for name in names]
        row = [str(attack.id), attack.title, attack.expect, *cells, fooled or "its careless counterpart"]
        lines.append("| " + " | ".join(row) + " |")
    lines.append("")
    for name in names:
        lines += [f"- {name}, {number}: {reason}." for number, reason in RESIDUAL[name].items()]
    return "\n".join(lines) + "\n"
