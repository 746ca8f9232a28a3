"""A judge that follows its rules, at a fake endpoint, and rollouts for it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from insitu.types import FinishedRollout, Outcome, Status, Task, Verdict
from insitu_tasksets.judges import ChatEndpoint
from insitu_tasksets.judges.endpoint import CONTROL
from tests.fakes.provider import KEY, FakeProvider, serve_provider

TASK = Task(id="t", prompt="Make f return 2.", files={})
SOLVED = Verdict(outcome=Outcome.RESOLVED, reward=1.0, trust="strong")
FAILED = Verdict(outcome=Outcome.UNRESOLVED, reward=0.0, trust="strong")
Reply = Callable[[Any], Mapping[str, Any]]


def finished(diff: str, name: str = "r/0", verdict: Verdict = SOLVED, **more: Any) -> FinishedRollout:
    fields: dict[str, Any] = {"id": name, "task": TASK, "row": {}, "files": {}, "diff": diff}
    rest = {"transcript": "", "turns": (), "status": Status.OK, "verdict": verdict}
    return FinishedRollout(**{**fields, **rest, **more})


def asked(body: Any) -> tuple[str, str, str]:
    """(mark, rules, material) of a question."""
    rules, material = (message["content"] for message in body["messages"][:2])
    (mark,) = set(re.findall(r'"mark" is (\w+)', rules))
    return mark, rules, material


def parts(body: Any) -> dict[str, str]:
    """The fenced parts of a question, as a judge sees them that looks for its own marks only."""
    mark, _, material = asked(body)
    return dict(re.findall(rf"^<([\w-]+) {mark}>\n(.*?)\n</\1 {mark}>$", material, re.DOTALL | re.MULTILINE))


def scored(score: Callable[[str, str], object]) -> Reply:
    """A judge that gives `score(name, text)`: of a criterion and the diff, or of a candidate."""

    def reply(body: Any) -> Mapping[str, Any]:
        if body["messages"] == CONTROL:
            return {"content": '{"ok": true}'}
        mark, rules, _ = asked(body)
        names = re.findall(r"^- ([\w-]+):", rules, re.MULTILINE)
        shown = parts(body)
        if names:
            diff = shown.get("diff", "")
            given = {name: {"why": "so", "score": score(name, diff)} for name in names}
            return {"content": json.dumps({"mark": mark, "criteria": given})}
        scores = {name: score(name, text) for name, text in shown.items() if name != "task"}
        return {"content": json.dumps({"mark": mark, "why": "so", "scores": scores})}

    return reply


@asynccontextmanager
async def judge_at(
    folder: Path, reply: Reply, **more: Any
) -> AsyncIterator[tuple[FakeProvider, ChatEndpoint]]:
    """A fake endpoint, and a client of it with a cache in `folder`; JUDGE_KEY must be set to its key."""
    async with serve_provider() as provider:
        provider.replies = reply
        options = {"cache": folder / "cache", "per_minute": 60_000, **more}
        yield provider, ChatEndpoint(url=f"{provider.url}/v1", model="judge", **options)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "cache" / "calls.jsonl").read_text().splitlines()]


__all__ = ["KEY", "asked", "finished", "judge_at", "parts", "records", "scored"]
