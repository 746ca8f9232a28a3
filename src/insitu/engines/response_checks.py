"""Checks of an engine server's response before it is recorded: invariants 1 and 2 of capture.

Servers may report fewer logprobs than ids, NaN, sentinels for missing values, tokens beyond the limit, a stop
without a stop id, or other prompt ids than were sent. Each is an EngineError here.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from insitu.errors import EngineError, EngineUnavailable
from insitu.types import (
    CallTimes,
    ExpertArray,
    Finish,
    FloatArray,
    Generation,
    IntArray,
    SamplingParams,
    VersionRuns,
)

FLOOR = -9000.0
"""No float32 softmax gives a sampled token so little; vLLM writes -9999 where it has no logprob."""

CONSTANT, WARM = 32, 0.5
"""Tokens and temperature from which a reply whose logprobs are all equal is refused, see `_check_vary`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawReply:
    """One reply as read from the wire, not yet checked."""

    ids: object
    logprobs: object
    finish: object
    """The server's own word."""
    version_runs: VersionRuns
    prompt: object = None
    """Prompt ids as the engine saw them; None = the server does not say."""
    cached: object = None
    """Prompt tokens from its prefix cache; None = the server does not say."""
    experts: object = None
    """Chosen experts, an array or a .npy file in base64; None = the server returns none."""


def checked(
    raw: RawReply, sent: IntArray, params: SamplingParams, where: str, *, demonstrated: bool = False
) -> Generation:
    """Return a Generation that satisfies the contract of `Engine.generate`; raise EngineError.

    demonstrated: of a scripted policy, whose ids have no logprobs.
    """
    ids = int_row(raw.ids, f"{where}: ids")
    if raw.prompt is not None and not np.array_equal(int_row(raw.prompt, f"{where}: prompt ids"), sent):
        raise EngineError(f"{where}: the engine saw other prompt ids than were sent")
    finish = _finish(raw.finish, where)
    if finish == "abort":
        raise EngineError(f"{where}: the engine aborted the request")
    refuse_none(raw.ids, where)
    if len(ids) > params.max_tokens:
        raise EngineError(f"{where}: {len(ids)} tokens where 1 to {params.max_tokens} were asked for")
    _check_stop(ids, finish, params, where)
    logprobs = None
    if not demonstrated:
        logprobs = _logprobs(raw.logprobs, len(ids), where)
        _check_vary(logprobs, params, where)
    _check_runs(raw.version_runs, len(ids), where)
    times = CallTimes(cached=raw.cached if type(raw.cached) is int else None)
    known = len(sent) - params.experts_from + len(ids) - 1
    return Generation(
        ids=ids,
        logprobs=logprobs,
        finish=finish,
        version_runs=raw.version_runs,
        times=times,
        experts=None if raw.experts is None else _experts(raw.experts, known, where),
    )


def refuse_none(ids: object, where: str) -> None:
    """Raise EngineUnavailable for a reply without a token."""
    # Even an immediate end is one token, so nothing was sampled: the same request may succeed later.
    if isinstance(ids, list) and not ids:
        raise EngineUnavailable(f"{where}: 0 tokens, where an end would be one")


def int_row(value: object, where: str) -> IntArray:
    """Return a list of ids as int32; raise EngineError."""
    if not isinstance(value, list):
        raise EngineError(f"{where} are missing")
    if not value:
        return np.empty(0, dtype=np.int32)
    try:
        row = np.array(value)
    except (ValueError, OverflowError) as error:
        raise EngineError(f"{where} are no row of whole numbers") from error
    if row.ndim != 1 or row.dtype.kind != "i":
        raise EngineError(f"{where} are no row of whole numbers")
    if int(row.min()) < 0 or int(row.max()) >= 2**31:
        raise EngineError(f"{where} hold a number that is not a token id")
    return row.astype(np.int32)


def _experts(value: object, count: int, where: str) -> ExpertArray:
    """Return the experts of `count` tokens; raise EngineError."""
    try:
        found = np.load(io.BytesIO(base64.b64decode(value))) if isinstance(value, str) else value
    except (ValueError, EOFError, binascii.Error) as error:
        raise EngineError(f"{where}: its experts are no array: {error}") from error
    if not isinstance(found, np.ndarray) or found.ndim != 3 or found.dtype.kind not in "iu":
        raise EngineError(f"{where}: its experts are no array of tokens, layers and choices")
    if len(found) != count:
        raise EngineError(f"{where}: experts of {len(found)} tokens where {count} were computed")
    if found.size and (int(found.min()) < 0 or int(found.max()) >= 2**15):
        raise EngineError(f"{where}: its experts hold a number that is none of an expert")
    return found.astype(np.int16)


def _finish(value: object, where: str) -> Finish:
    if value == "stop":
        return "stop"
    if value == "length":
        return "length"
    if value == "abort":
        return "abort"
    raise EngineError(f"{where}: finish reason {value!r}")


def _check_stop(ids: IntArray, finish: Finish, params: SamplingParams, where: str) -> None:
    """Check that a stop keeps its stop id as the last one, and that generation ends at the first."""
    stops = np.flatnonzero(np.isin(ids, list(params.stop_ids)))
    if stops.size and stops[0] < len(ids) - 1:
        raise EngineError(f"{where}: {len(ids) - 1 - int(stops[0])} tokens follow a stop id")
    if finish == "stop" and not stops.size:
        raise EngineError(f"{where}: finished with stop, but the last id is not a stop id of this request")


def _logprobs(value: object, count: int, where: str) -> FloatArray:
    if not isinstance(value, list):
        raise EngineError(f"{where}: no logprobs")
    if len(value) != count:
        raise EngineError(f"{where}: {len(value)} logprobs for {count} ids")
    for index, item in enumerate(value):
        if type(item) not in (float, int) or not math.isfinite(item):
            raise EngineError(f"{where}: logprob {index} is {item!r}")
        if not FLOOR < item <= 0:
            raise EngineError(f"{where}: logprob {index} is {item!r}, which no sampled token can have")
    return np.array(value, dtype=np.float32)


def _check_vary(logprobs: FloatArray, params: SamplingParams, where: str) -> None:
    """Raise EngineError for a long reply with constant logprobs, mostly 0.0, which were filled in.

    Honest float32 logprobs round to 0.0 above a probability of 1 - 6e-8. From a temperature of 0.5 that takes
    a lead of 8 nats or more over all other ids at each token: copied passages have such tokens, but hardly a
    whole reply of CONSTANT of them. Colder or shorter replies pass.
    """
    if len(logprobs) >= CONSTANT and params.temperature >= WARM and bool((logprobs == logprobs[0]).all()):
        raise EngineError(
            f"{where}: all {len(logprobs)} logprobs are {float(logprobs[0]):g}: they are not those of the ids"
        )


def _check_runs(runs: VersionRuns, count: int, where: str) -> None:
    starts = [start for start, _ in runs]
    if not runs or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= count:
        raise EngineError(f"{where}: version runs {list(runs)} do not cover {count} tokens")


def runs_of_spans(spans: object, version_of: dict[str, int] | None, count: int, where: str) -> VersionRuns:
    """Return (start, version) pairs of `[{version, start, end}, …]`, which must cover 0..count without gaps.

    `version_of` maps labels that are not numbers. Raises EngineError.
    """
    if not isinstance(spans, list) or not spans:
        raise EngineError(f"{where}: no weight versions")
    runs: list[tuple[int, int]] = []
    end = 0
    for span in spans:
        if not isinstance(span, dict) or span.get("start") != end or type(span.get("end")) is not int:
            raise EngineError(f"{where}: weight versions {spans} do not cover the reply")
        end = span["end"]
        runs.append((int(span["start"]), version_number(span.get("version"), version_of, where)))
    if end != count:
        raise EngineError(f"{where}: weight versions cover {end} of {count} tokens")
    return tuple(runs)


def version_number(label: object, known: dict[str, int] | None, where: str) -> int:
    """Return the policy version of a weight label; raise EngineError for an unknown label."""
    text = str(label)
    if known and text in known:
        return known[text]
    if not text.isdecimal():
        raise EngineError(f"{where}: weights labelled {text!r}, which no publication of ours set")
    return int(text)


def first(items: object, where: str) -> dict[str, object]:
    """Return the only element of a list of objects; raise EngineError."""
    if not isinstance(items, Sequence) or len(items) != 1 or not isinstance(items[0], dict):
        raise EngineError(f"{where}: not exactly one choice")
    return items[0]
