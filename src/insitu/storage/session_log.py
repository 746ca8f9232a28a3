"""Write-ahead log of a live session, to recover its forest after the gateway was killed.

`LoggedForest` appends one frame per change of the forest; `recover` replays the frames up to the first torn
one. A frame has lengths, a CRC checksum and content, and is written with one system call: nothing is lost
when the process is killed, but frames are not synced against power loss. The file contains prompts; its mode
is 0600.
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

from insitu.capture.digests import MessageHasher
from insitu.capture.drift import PromptPlan, stored_context
from insitu.capture.drift_diagnosis import Diagnosis
from insitu.capture.forest import Forest
from insitu.capture.message_history import Digests
from insitu.errors import CaptureError, RecordError, boundary
from insitu.types import ExpertArray, Generation, IntArray, Message, MessageSpans
from insitu.types.codec import head, pick, read

SCHEMA_VERSION = 4
_HEAD = struct.Struct("<III")  # bytes of JSON, bytes of arrays, CRC of both
_MAX_FRAME = 1 << 30


class LogFile:
    """Append-only file of frames, opened by `create`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, rollout_id: str, *, train_auxiliary: bool = False) -> LogFile:
        """Create the file and write its header frame.

        Raises RecordError, also when the file exists.
        """
        with boundary(RecordError, f"cannot create {path}"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            log = cls(path, os.open(path, flags, 0o600))
        opened = {"op": "open", "schema_version": SCHEMA_VERSION, "rollout_id": rollout_id}
        log.write({**opened, "train_auxiliary": train_auxiliary})
        return log

    def write(self, event: dict[str, Any], *arrays: npt.NDArray[Any] | None) -> None:
        """Append one frame.

        Raises RecordError.
        """
        content = _json(event)
        raw = b"".join(a.astype(a.dtype.newbyteorder("<")).tobytes() for a in arrays if a is not None)
        frame = _HEAD.pack(len(content), len(raw), zlib.crc32(raw, zlib.crc32(content))) + content + raw
        with boundary(RecordError, f"cannot write {self.path}"):
            if os.write(self._descriptor, frame) < len(frame):
                raise RecordError(f"disk full while writing {self.path}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _json(event: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(event)
    except TypeError:  # Lone surrogates cannot be encoded as UTF-8.
        return orjson.dumps(_replace_surrogates(event))


def _replace_surrogates(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_surrogates(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _replace_surrogates(head(value))
    return value


class LoggedForest(Forest):
    """Forest that appends each change to a log; raises RecordError when the write fails."""

    def __init__(
        self,
        rollout_id: str,
        pointer_key: bytes,
        log: LogFile,
        reset_roles: frozenset[str] = frozenset(),
        *,
        train_auxiliary: bool = False,
    ) -> None:
        super().__init__(rollout_id, pointer_key, reset_roles, train_auxiliary=train_auxiliary)
        self._log = log
        self._advisory: Sequence[tuple[str, str]] = ()

    def extend(
        self,
        plan: PromptPlan,
        delta: IntArray,
        diagnosis: Diagnosis | None = None,
        spans: MessageSpans = (),
    ) -> int:
        node = super().extend(plan, delta, diagnosis, spans)
        run = plan.digests.run()
        event = {
            "op": "extend",
            "node": node,
            "root_key": plan.root_key,
            "base": plan.base,
            "messages": plan.replace,
            # Logged because the digests depend on preceding call ids, which may differ from the stored ones.
            "said": run.content.hex(),
            "reasoning": [(index, digest.hex()) for index, digest in (run.reasoning or {}).items()],
            "defaults": plan.reader.defaults,
            "tools": plan.tools,
            "tool_choice_none": plan.tool_choice_none,
            "streamed": plan.streamed,
            "echoes": sorted(plan.echoes),
            "hints": plan.hints,
            "drift": plan.drift,
            "diagnosis": diagnosis,
            "spans": spans,
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
            **head(generation),
            "count": len(generation.ids),
            "sampled": generation.logprobs is not None,
            "reply": reply,
            **kept,
        }
        if generation.experts is not None:
            event["experts"] = generation.experts.shape
        # Logged only on change: nearly every call has the same ones.
        if advisory is not self._advisory and advisory != self._advisory:
            self._advisory = event["advisory"] = advisory
        self._log.write(event, generation.ids, generation.logprobs, generation.experts)
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
class _Recovered:
    """Result of replaying a session log."""

    rollout_id: str
    forest: Forest
    frames: int
    torn: bool
    """The file ends with an incomplete frame: the process died while writing."""


def recover(path: Path) -> _Recovered:
    """Rebuild the forest from all complete frames of a log.

    Raises RecordError when the file is not a session log.
    """
    with boundary(RecordError, f"cannot read {path}"):
        raw = path.read_bytes()
    frames = list(_frames(raw))
    if not frames or frames[0][0].get("op") != "open":
        raise RecordError(f"{path} is not a session log")
    if frames[0][0]["schema_version"] != SCHEMA_VERSION:
        raise RecordError(f"{path} was written by another version of insitu")
    rollout_id = str(frames[0][0]["rollout_id"])
    forest = _ReplayedForest(rollout_id, train_auxiliary=bool(frames[0][0]["train_auxiliary"]))
    try:
        for event, arrays in frames[1:]:
            forest.apply(event, arrays)
    except (KeyError, TypeError, ValueError, CaptureError) as error:
        raise RecordError(f"{path} cannot be replayed: {error}") from error
    used = sum(_HEAD.size + size for _, _, size in _sized(raw))
    return _Recovered(rollout_id=rollout_id, forest=forest, frames=len(frames), torn=used < len(raw))


def _frames(raw: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    for event, arrays, _ in _sized(raw):
        yield event, arrays


def _sized(raw: bytes) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    at = 0
    while at + _HEAD.size <= len(raw):
        content, arrays, crc = _HEAD.unpack_from(raw, at)
        size = content + arrays
        start, end = at + _HEAD.size, at + _HEAD.size + size
        # A file system may leave zeros after the written bytes.
        if not content or size > _MAX_FRAME or end > len(raw) or zlib.crc32(raw[start:end]) != crc:
            return
        yield orjson.loads(raw[start : start + content]), raw[start + content : end], size
        at = end


class _ReplayedForest(Forest):
    """Forest that applies logged changes."""

    def __init__(self, rollout_id: str, *, train_auxiliary: bool) -> None:
        super().__init__(rollout_id, train_auxiliary=train_auxiliary)
        self._hashers: dict[bytes, MessageHasher] = {}
        self._advisory: Sequence[tuple[str, str]] = ()

    def _hasher(self, defaults: dict[str, dict[str, str]]) -> MessageHasher:
        key = orjson.dumps(defaults, option=orjson.OPT_SORT_KEYS)
        return self._hashers.setdefault(key, MessageHasher(defaults))

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
        messages = read(tuple[Message, ...], event["messages"])
        digests = Digests(
            bytes.fromhex(event["said"]),
            {index: bytes.fromhex(digest) for index, digest in event["reasoning"]},
            {i: message for i, message in enumerate(messages) if message.role == "assistant"},
            (),  # Used only while planning.
        )
        reader = self._hasher(event["defaults"])
        parent = stored_context(self._nodes, event["root_key"], base, digests)
        plan = pick(PromptPlan, event, parent=parent, replace=messages, digests=digests, reader=reader)
        diagnosis = read(Diagnosis | None, event["diagnosis"])
        spans = read(MessageSpans, event.get("spans", ()))
        self._check_node(event, self.extend(plan, delta, diagnosis, spans))

    def _commit(self, event: dict[str, Any], arrays: bytes) -> None:
        count = event["count"]
        ids = np.frombuffer(arrays, dtype="<i4", count=count).astype(np.int32)
        logprobs = None
        if event["sampled"]:
            logprobs = np.frombuffer(arrays, dtype="<f4", count=count, offset=4 * count).astype(np.float32)
        experts: ExpertArray | None = None
        if shape := event.get("experts"):
            offset = 8 * count if event["sampled"] else 4 * count
            experts = np.frombuffer(arrays, dtype="<i2", offset=offset).astype(np.int16).reshape(shape)
        generation = pick(Generation, event, ids=ids, logprobs=logprobs, experts=experts)
        reply = read(Message, event["reply"])
        if "advisory" in event:
            self._advisory = read(tuple[tuple[str, str], ...], event["advisory"])
        node = self.commit(
            event["context"],
            generation,
            reply,
            turn=event["turn"],
            synthetic=event["synthetic"],
            discarded=event["discarded"],
            labels=event["labels"],
            advisory=self._advisory,
        )
        self._check_node(event, node)

    def _check_node(self, event: dict[str, Any], node: int) -> None:
        if node != event["node"]:
            raise ValueError(f"node {event['node']} became node {node}")
