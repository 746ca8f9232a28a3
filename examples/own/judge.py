"""A language model as a judge: a reward function with a rate limit, retries and a cache on disk.

    [reward]
    function = "examples/own/judge.py:reward"
    timeout_s = 120

JUDGE_URL, JUDGE_KEY and JUDGE_MODEL name an OpenAI-compatible server. An error of the judge is raised: the
attempt is then an infrastructure failure and is retried, never a rollout with reward 0.
"""

import asyncio
import hashlib
import json
import os
import re
import time
from pathlib import Path

from openai import AsyncOpenAI

import insitu

PROMPT = """Rate how clear and minimal this change is, from 0 (bad) to 10 (good). End with "score: N".

Task: {prompt}

{diff}"""
CACHE = Path(os.environ.get("JUDGE_CACHE", "judge-cache"))
PER_MINUTE = 120
WEIGHT = 0.2


class Pace:
    """Start at most PER_MINUTE requests in a minute, evenly spaced."""

    next_at = 0.0

    async def wait(self) -> None:
        now = time.monotonic()
        start = max(now, self.next_at)
        self.next_at = start + 60 / PER_MINUTE
        await asyncio.sleep(start - now)


pace = Pace()


async def ask(prompt: str) -> str:
    """Return the judge's reply, from the cache if it was asked before."""
    model = os.environ["JUDGE_MODEL"]
    file = CACHE / (hashlib.sha256(f"{model}\n{prompt}".encode()).hexdigest() + ".json")
    if file.exists():
        return json.loads(file.read_text())["reply"]
    await pace.wait()
    url, key = os.environ["JUDGE_URL"], os.environ.get("JUDGE_KEY", "none")
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=5) as client:
        done = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], temperature=0
        )
    reply = done.choices[0].message.content or ""
    save(file, reply)
    return reply


def save(file: Path, reply: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"reply": reply}))


async def reward(rollout: insitu.FinishedRollout) -> dict[str, float]:
    """Reward the hidden tests, and the judge's opinion of a change that passes them."""
    solved = rollout.verdict.reward or 0.0
    if solved < 1.0:
        return {"solved": solved}
    reply = await ask(PROMPT.format(prompt=rollout.task.prompt, diff=rollout.diff))
    found = re.search(r"score:\s*(\d+)", reply)
    if found is None:
        raise ValueError(f"the judge gave no score: {reply[-100:]!r}")
    return {"solved": solved, "judge": WEIGHT * min(10, int(found[1])) / 10}
