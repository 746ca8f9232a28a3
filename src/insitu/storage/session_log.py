"""A session on disk while it lives: what the gateway held when it was killed can be had back.

`LoggedForest` appends one frame per change of the forest, after it and before anything follows from it;
`recover` reads the frames up to the first torn one and makes the same changes again. A frame is its length,
its CRC and its content; it is written with one system call, so a killed process loses nothing it had written
(a machine that loses power may: nothing is synced). The file holds prompts, so only its owner may read it.
Callers: gateway.session, serve.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from insitu.capture.digests import DigestedMessages, MessageHasher
from insitu.capture.drift import Drift, PromptPlan, held_context
from insitu.capture.drift_diagnosis import Diagnosis
from insitu.capture.forest import Forest
from insitu.errors import CaptureError, RecordError, boundary
from insitu.types import Generation, IntArray, Message, ToolCall

SCHEMA_VERSION = 4
_HEAD = struct.Struct("<III")  # bytes of JSON, bytes of arrays, CRC of both
_MAX_FRAME = 1 << 30


class LogFile:
    """Appends frames; made anew by `create`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, rollout_id: str, *, train_auxiliary: bool = False) -> LogFile:
        """Raises RecordError, also when the file exists."""
        with boundary(RecordError, f"cannot create {path}"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            log = cls(path, os.open(path, flags, 0o600))
        opened = {"op": "open", "schema_version": SCHEMA_VERSION, "rollout_id": rollout_id}
        log.write({**opened, "train_auxiliary": train_auxiliary})
        return log

    def write(self, event: dict[str, Any], *arrays: npt.NDArray[Any] | None) -> None:
        """One frame. Raises RecordError."""
        told = _json(event)
        raw = b"".join(a.astype(a.dtype.newbyteorder("<")).tobytes() for a in arrays if a is not None)
        frame = _HEAD.pack(len(told), len(raw), zlib.crc32(raw, zlib.crc32(told))) + told + raw
        with boundary(RecordError, f"cannot write {self.path}"):
            if os.write(self._descriptor, frame) < len(frame):
                raise RecordError(f"disk full while writing {self.path}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _json(event: dict[str, Any]) -> bytes:
    """Lone surrogates, which JSON in UTF-8 cannot hold, become question marks."""
    try:
        return orjson.dumps(event)
    except TypeError:
        return orjson.dumps(_clean(event))


def _clean(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_clean(key): _clean(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(held) for held in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _clean(value.__getattribute__(field.name)) for field in dataclasses.fields(value)}
    return value


class LoggedForest(Forest):
    """A Forest that writes down each change. A change that cannot be written raises RecordError."""

    def __init__(
        self,
        rollout_id: str,
        pointer_key: bytes,
        log: LogFile,
        asking: frozenset[str] = frozenset(),
        *,
        train_auxiliary: bool = False,
    ) -> None:
        super().__init__(rollout_id, pointer_key, asking, train_auxiliary=train_auxiliary)
        self._log = log
        self._wished: Sequence[tuple[str, str]] = ()

    def extend(self, plan: PromptPlan, delta: IntArray, diagnosis: Diagnosis | None = None) -> int:
        node = super().extend(plan, delta, diagnosis)
        run = plan.told.run()
        event = {
            "op": "extend",
            "node": node,
            "root_key": plan.root_key,
            "base": plan.base,
            "messages": plan.replace,
            # What they mean hangs on the call ids before them, which may not be those that were held.
            "said": run.said.hex(),
            "reasoning": [(index, digest.hex()) for index, digest in (run.reasoning or {}).items()],
            "defaults": plan.told.reader.defaults,
            "tools": plan.tools,
            "tool_choice_none": plan.tool_choice_none,
            "streamed": plan.streamed,
            "echoes": sorted(plan.echoes),
            "hints": plan.hints,
            "drift": plan.drift,
            "diagnosis": diagnosis,
        }
        self._log.write(event, delta)
        return node

    def commit(
        self,
        node: int,
        generation: Generation,
        reply: Message,
        *,
        turn: int,
        synthetic: bool = False,
        discarded: int = 0,
        labels: Sequence[str] = (),
        advisory: Sequence[tuple[str, str]] = (),
    ) -> int:
        kept: dict[str, Any] = {"synthetic": synthetic, "discarded": discarded, "labels": list(labels)}
        sampled = super().commit(node, generation, reply, turn=turn, advisory=advisory, **kept)
        event = {
            "op": "commit",
            "node": sampled,
            "context": node,
            "turn": turn,
            "finish": generation.finish,
            "version_runs": generation.version_runs,
            "count": len(generation.ids),
            "sampled": generation.logprobs is not None,
            "reply": reply,
            **kept,
        }
        if advisory is not self._wished and advisory != self._wished:  # the same with almost every call
            self._wished = event["advisory"] = advisory
        self._log.write(event, generation.ids, generation.logprobs)
        return sampled

    def mark_delivered(self, node: int) -> None:
        super().mark_delivered(node)
        self._log.write({"op": "delivered", "node": node})

    def mark_aborted(self, node: int) -> None:
        super().mark_aborted(node)
        self._log.write({"op": "aborted", "node": node})

    def exclude(self, node: int, reason: str) -> None:
        super().exclude(node, reason)
        self._log.write({"op": "exclude", "node": node, "reason": reason})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a log gives back."""

    rollout_id: str
    forest: Forest
    frames: int
    torn: bool
    """Bytes followed that are no whole frame: the process died while it wrote."""


def recover(path: Path) -> Recovered:
    """The forest as the last whole frame left it. Raises RecordError for a file that is no session log."""
    with boundary(RecordError, f"cannot read {path}"):
        raw = path.read_bytes()
    frames = list(_frames(raw))
    if not frames or frames[0][0].get("op") != "open":
        raise RecordError(f"{path} is not a session log")
    if frames[0][0]["schema_version"] != SCHEMA_VERSION:
        raise RecordError(f"{path} was written by another version of insitu")
    rollout_id = str(frames[0][0]["rollout_id"])
    again = _Replay(rollout_id, train_auxiliary=bool(frames[0][0]["train_auxiliary"]))
    try:
        for event, arrays in frames[1:]:
            again.apply(event, arrays)
    except (KeyError, TypeError, ValueError, CaptureError) as error:
        raise RecordError(f"{path} cannot be replayed: {error}") from error
    used = sum(_HEAD.size + size for _, _, size in _sized(raw))
    return Recovered(rollout_id=rollout_id, forest=again, frames=len(frames), torn=used < len(raw))


def _frames(raw: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    for event, arrays, _ in _sized(raw):
        yield event, arrays


def _sized(raw: bytes) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    at = 0
    while at + _HEAD.size <= len(raw):
        told, arrays, crc = _HEAD.unpack_from(raw, at)
        start, end = at + _HEAD.size, at + _HEAD.size + told + arrays
        # A file system may leave zeros behind what was written.
        if not told or told + arrays > _MAX_FRAME or end > len(raw) or zlib.crc32(raw[start:end]) != crc:
            return
        yield orjson.loads(raw[start : start + told]), raw[start + told : end], told + arrays
        at = end


class _Replay(Forest):
    """Makes logged changes again."""

    def __init__(self, rollout_id: str, *, train_auxiliary: bool) -> None:
        super().__init__(rollout_id, train_auxiliary=train_auxiliary)
        self._by_defaults: dict[bytes, MessageHasher] = {}
        self._wished: Sequence[tuple[str, str]] = ()

    def _reader_of(self, defaults: dict[str, dict[str, str]]) -> MessageHasher:
        key = orjson.dumps(defaults, option=orjson.OPT_SORT_KEYS)
        return self._by_defaults.setdefault(key, MessageHasher(defaults))

    def apply(self, event: dict[str, Any], arrays: bytes) -> None:
        kind = event["op"]
        if kind == "extend":
            self._extend(event, np.frombuffer(arrays, dtype="<i4").astype(np.int32))
        elif kind == "commit":
            self._commit(event, arrays)
        elif kind == "exclude":
            self.exclude(event["node"], event["reason"])
        elif kind == "delivered":
            self.mark_delivered(event["node"])
        elif kind == "aborted":
            self.mark_aborted(event["node"])
        else:
            raise ValueError(f"unknown change {kind!r}")

    def _extend(self, event: dict[str, Any], delta: IntArray) -> None:
        base = event["base"]
        replaced = tuple(_message(told) for told in event["messages"])
        told = DigestedMessages(
            replaced,
            bytes.fromhex(event["said"]),
            {index: bytes.fromhex(digest) for index, digest in event["reasoning"]},
            {},  # this and the next are read only while planning
            (),
            self._reader_of(event["defaults"]),
        )
        plan = PromptPlan(
            root_key=event["root_key"],
            base=base,
            parent=held_context(self._nodes, event["root_key"], base, told),
            replace=replaced,
            drift=Drift(**event["drift"]),
            told=told,
            tools=event["tools"],
            tool_choice_none=event["tool_choice_none"],
            streamed=event["streamed"],
            echoes=frozenset(event["echoes"]),
            hints=tuple((name, value) for name, value in event["hints"]),
        )
        diagnosis = None if event["diagnosis"] is None else Diagnosis(**event["diagnosis"])
        self._expect(event, self.extend(plan, delta, diagnosis))

    def _commit(self, event: dict[str, Any], arrays: bytes) -> None:
        count = event["count"]
        ids = np.frombuffer(arrays, dtype="<i4", count=count).astype(np.int32)
        logprobs = None
        if event["sampled"]:
            logprobs = np.frombuffer(arrays, dtype="<f4", offset=4 * count).astype(np.float32)
        generation = Generation(
            ids=ids,
            logprobs=logprobs,
            finish=event["finish"],
            version_runs=tuple((start, version) for start, version in event["version_runs"]),
        )
        reply = _message(event["reply"])
        if "advisory" in event:
            self._wished = tuple((name, wish) for name, wish in event["advisory"])
        node = self.commit(
            event["context"],
            generation,
            reply,
            turn=event["turn"],
            synthetic=event["synthetic"],
            discarded=event["discarded"],
            labels=event["labels"],
            advisory=self._wished,
        )
        self._expect(event, node)

    def _expect(self, event: dict[str, Any], node: int) -> None:
        if node != event["node"]:
            raise ValueError(f"node {event['node']} became node {node}")


def _message(told: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in told["tool_calls"])
    return Message(**{**told, "tool_calls": calls, "pointers": tuple(told["pointers"])})
