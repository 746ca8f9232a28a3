"""Every page of the viewer, as addresses behind `#/`."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

ROLLOUT = "train/00001/000/03"
TABS = ("transcript", "tokens", "diff", "verdict", "tree", "attempts", "log", "files", "raw")

FOREIGN = """() => ({
  pwned: window.pwned,
  violations: window.violations ?? [],
  made: document.querySelectorAll(
    ['script', 'iframe', 'object', 'embed', 'img', '[onload]', '[onerror]', '[onmouseover]']
      .map(name => `main ${name}`).join()
  ).length,
  links: [...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))
    .filter(href => !/^(#|api\\/)/.test(href)),
})"""
"""What hostile text could have made of a page."""
HOSTILE = "<img src=x onerror=window.pwned=1>"


def task_of(run: Path) -> str:
    with closing(sqlite3.connect(run / "run.sqlite")) as db:
        return str(db.execute("SELECT task_id FROM rollouts WHERE rollout_id = ?", (ROLLOUT,)).fetchone()[0])


def addresses(run: str, task: str) -> dict[str, str]:
    """Return name -> address of every page of a run."""
    name = quote(run, safe="")
    at = f"#/{name}"
    other = quote("train/00001/000/00", safe="")
    found = {
        "runs": "#/",
        "overview": at,
        "step": f"{at}/step/1",
        "group": f"{at}/group/train/1/0",
        "rollouts": f"{at}/rollouts",
        "filtered": f"{at}/rollouts?outcome=unresolved&sort=-agent_s&q=shop",
        "search": f"{at}/search?text=fix",
        "tasks": f"{at}/tasks",
        "grid": f"{at}/tasks?view=grid",
        "held-out grid": f"{at}/tasks?view=grid&phase=eval_after&order=change",
        "task": f"{at}/task/{quote(task, safe='')}",
        "health": f"{at}/health",
        "cheats": f"{at}/cheats",
        "config": f"{at}/config",
        "compare": f"#/compare/{name}",
        "pair": f"#/compare/{name}?id_a={quote(ROLLOUT, safe='')}&id_b={other}",
    }
    for tab in TABS:
        rollout = "train/00001/000/00" if tab in ("log", "files") else ROLLOUT
        found[tab] = f"{at}/rollout/{rollout}?tab={tab}"
    found["turn"] = f"{at}/rollout/{ROLLOUT}?tab=tokens&turn=0&signal=logprob&at=5"
    return found
