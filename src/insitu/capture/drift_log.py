"""Log of drifts with their diagnosis and of client metadata; labels, never keys.

In the order of the requests; contains no text of the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insitu.capture.drift import Drift, PromptPlan
from insitu.capture.drift_diagnosis import Diagnosis
from insitu.capture.nodes import Nodes
from insitu.types import DriftNote

MAX_HINTS, MAX_LABEL_CHARS = 16, 256
MAX_PARAMS, MAX_PARAM_CHARS = 32, 512

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
        self._entries: list[_DriftEntry] = []
        self._last: Pairs = ()
        self._ignored: tuple[Sequence[tuple[str, str]], Pairs] = ((), ())
        """As last received, and as stored."""

    def add(self, plan: PromptPlan, context: int, diagnosis: Diagnosis | None) -> None:
        """Record the drift of a request, unless it was clean."""
        if plan.drift.kind != "clean":
            self._entries.append(_DriftEntry(plan.drift, context, plan.echoes, diagnosis))

    def hints(self, hints: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Return client metadata, bounded; equal values share one object."""
        kept = tuple((plain(name), plain(value)) for name, value in hints[:MAX_HINTS])
        if kept != self._last:
            self._last = kept
        return self._last

    def ignored_params(self, ignored_params: Sequence[tuple[str, str]]) -> Pairs:
        """Return ignored parameters, bounded; equal values share one object.

        Agents send the same ones with each call, so memory grows only with changes.
        """
        received, kept = self._ignored
        if ignored_params is not received and ignored_params != received:
            kept = tuple(
                (plain(name), plain(value, MAX_PARAM_CHARS)) for name, value in ignored_params[:MAX_PARAMS]
            )
        self._ignored = ignored_params, kept
        return kept

    def drifts(self) -> tuple[DriftNote, ...]:
        return tuple(self._note(entry) for entry in self._entries)

    def _note(self, entry: _DriftEntry) -> DriftNote:
        drift, found = entry.drift, entry.diagnosis or Diagnosis(cause=entry.drift.cause)
        request = self._nodes.context(entry.context)
        return DriftNote(
            kind=drift.kind,
            cause=found.cause,
            request=min((self._nodes.sampled(child).turn for child in request.children), default=-1),
            turn=-1 if drift.turn is None else drift.turn,
            token=found.token,
            tokens=self._concerned(entry, found.token),
            detail=plain(found.detail),
        )

    def _concerned(self, entry: _DriftEntry, token: int) -> int:
        """Return how many sampled ids the request re-renders as context or leaves out."""
        turns = set(entry.echoes)
        shared = 0
        if entry.drift.kind == "edited" and entry.drift.node is not None:
            turns.add(entry.drift.node)
            shared = max(token, 0)
        return sum(len(self._nodes.sampled(node).generation.ids) for node in turns) - shared


def plain(text: str, most: int = MAX_LABEL_CHARS) -> str:
    """Return short text without lone surrogates, which no file can hold."""
    return text[:most].encode("utf-8", "replace").decode()
