"""What capture tells people: drifts with their diagnosis, and the agent's hints. Labels, never keys.

Kept by the forest in the order of the requests; `drift_lines` prints them. Nothing here holds a text of the
conversation. Callers: forest, and whoever shows a rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from insitu.capture.drift import Drift, PromptPlan
from insitu.capture.drift_diagnosis import Diagnosis
from insitu.capture.nodes import Nodes
from insitu.types import DriftNote

MAX_HINTS, MAX_LABEL_CHARS = 16, 256
MAX_WISHES, MAX_WISH_CHARS = 32, 512

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _DriftEntry:
    drift: Drift
    context: int
    """Context node of the request."""
    echoes: frozenset[int]
    diagnosis: Diagnosis | None


class DriftLog:
    """Drifts and hints of one session."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._noted: list[_DriftEntry] = []
        self._last: Pairs = ()
        self._wished: tuple[Sequence[tuple[str, str]], Pairs] = ((), ())
        """As it came last, and as it is kept."""

    def add(self, plan: PromptPlan, context: int, diagnosis: Diagnosis | None) -> None:
        """Remember the drift of a request, unless it was clean."""
        if plan.drift.kind != "clean":
            self._noted.append(_DriftEntry(plan.drift, context, plan.echoes, diagnosis))

    def hints(self, hints: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Bounded; equal to the last request's means the same object, so that a session holds few."""
        kept = tuple((_plain(name), _plain(value)) for name, value in hints[:MAX_HINTS])
        if kept != self._last:
            self._last = kept
        return self._last

    def ignored_params(self, ignored_params: Sequence[tuple[str, str]]) -> Pairs:
        """Bounded. Agents wish the same with each call, and that is one object: what is kept for a session
        grows with the changes."""
        given, kept = self._wished
        if ignored_params is not given and ignored_params != given:
            kept = tuple(
                (_plain(name), _plain(value, MAX_WISH_CHARS)) for name, value in ignored_params[:MAX_WISHES]
            )
        self._wished = ignored_params, kept
        return kept

    def drifts(self) -> tuple[DriftNote, ...]:
        return tuple(self._note(noted) for noted in self._noted)

    def _note(self, noted: _DriftEntry) -> DriftNote:
        drift, found = noted.drift, noted.diagnosis or Diagnosis(cause=noted.drift.cause)
        asked = self._nodes.context(noted.context)
        return DriftNote(
            kind=drift.kind,
            cause=found.cause,
            request=min((self._nodes.sampled(child).turn for child in asked.children), default=-1),
            turn=-1 if drift.turn is None else drift.turn,
            token=found.token,
            tokens=self._concerned(noted, found.token),
            detail=_plain(found.detail),
        )

    def _concerned(self, noted: _DriftEntry, token: int) -> int:
        """Sampled ids of held turns that the request re-renders as context, or leaves out."""
        turns = set(noted.echoes)
        shared = 0
        if noted.drift.kind == "edited" and noted.drift.node is not None:
            turns.add(noted.drift.node)
            shared = max(token, 0)
        return sum(len(self._nodes.sampled(node).generation.ids) for node in turns) - shared


def _plain(text: str, most: int = MAX_LABEL_CHARS) -> str:
    """Short, and without lone surrogates, which no file can hold."""
    return text[:most].encode("utf-8", "replace").decode()


def drift_lines(drifts: Sequence[DriftNote]) -> list[str]:
    """One line per drift, newest last, and a total per cause; empty when there was none."""
    lines = []
    for note in drifts:
        asked = f"turn {note.request}" if note.request >= 0 else "a call without reply"
        line = f"{note.kind} before {asked}: {note.cause}"
        if note.detail:
            line += f" ({note.detail})"
        if note.turn >= 0:
            line += f", turn {note.turn}"
        if note.token >= 0:
            line += f" from token {note.token}"
        lines.append(f"{line}, {note.tokens} sampled tokens concerned" if note.tokens else line)
    return [*lines, *drift_totals(drifts)]


def drift_totals(drifts: Sequence[DriftNote]) -> list[str]:
    """One line per kind and cause, with the sampled tokens concerned."""
    counts = Counter((note.kind, note.cause) for note in drifts)
    tokens: Counter[tuple[str, str]] = Counter()
    for note in drifts:
        tokens[note.kind, note.cause] += note.tokens
    return [
        f"total {kind} {cause}: {count}, {tokens[kind, cause]} sampled tokens concerned"
        for (kind, cause), count in sorted(counts.items())
    ]
