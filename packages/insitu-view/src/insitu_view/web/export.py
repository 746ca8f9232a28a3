"""`insitu view RUN… --export FILE`: the pages of runs in one file that opens from disk.

The file holds what the server would answer to each path of its pages (routes.PAGES), redacted, and the same
modules as one inline script; static/embedded.js answers from them.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from insitu.errors import ConfigError, InsituError, SetupError
from insitu_train.redaction import Redaction
from insitu_view.web.bundle import bundle, icon
from insitu_view.web.context import Context
from insitu_view.web.findings import compare_runs, compare_tasks
from insitu_view.web.pages import tasks_page
from insitu_view.web.query import Query
from insitu_view.web.routes import PAGES, compare
from insitu_view.web.runs import RunHandle, Runs, run_info
from insitu_view.web.serve import STATIC, encode
from insitu_view.web.token_page import decode

PACK_BYTES = 4 << 20
"""Uncompressed size after which another pack begins: a page decompresses one pack."""
TOKENS = 4096
"""Tokens of one page, as PAGE_TOKENS of static/tokens_page.js."""
MAX_PAIRS = 12
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; base-uri 'none';"
    " form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def export(
    paths: Sequence[Path],
    file: Path,
    out: TextIO,
    *,
    rollouts: str,
    redact: Sequence[str],
    tokens: bool,
    checks: bool,
    max_mib: int,
) -> None:
    """Write the file. Raises InsituError, also when the file would be larger than `max_mib`.

    rollouts: empty = the telling ones and pairs before and after; a number = the newest; ids with commas;
    `all`. checks: keep failing checks of verdicts, which show hidden tests.
    """
    found = Runs(paths)
    runs = found.all()
    if not runs:
        raise ConfigError("--export: there is no run at the given paths")
    if len(runs) > 1 and not re.fullmatch(r"|all|\d+", rollouts):
        raise ConfigError(f"--rollouts with ids takes one run, and there are {len(runs)} at the given paths")
    pages = _Pages(Context(runs=found), runs, Redaction(redact), tokens, checks)
    pages.add_all(rollouts)
    body = _document(pages).encode("utf-8", "replace")
    if len(body) > max_mib << 20:
        raise ConfigError(
            f"{file} would have {len(body) / (1 << 20):.2f} MiB, more than --max-mib"
            f" {max_mib}: choose fewer --rollouts, or add --no-tokens"
        )
    try:
        file.write_bytes(body)
    except OSError as error:
        raise SetupError(f"cannot write {file}: {error.strerror}") from error
    print(f"{file}: {len(body) / (1 << 20):.1f} MiB. {pages.left_out()}", file=out)


@dataclass(slots=True)
class _Pages:
    """Answers of the viewer's pages, packed, by path and parameters."""

    context: Context
    runs: Sequence[RunHandle]
    redaction: Redaction
    tokens: bool
    checks: bool
    index: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Path and parameters -> pack, offset, length."""
    packs: list[bytearray] = field(default_factory=lambda: [bytearray()])
    chosen: dict[str, None] = field(default_factory=dict)
    """Ids of the rollouts of the current run that are there whole, in order."""
    added: set[tuple[str, ...]] = field(default_factory=set)
    """Groups, steps and tasks that are there, with their run."""
    run: RunHandle = field(init=False)
    """The run whose pages are being added."""
    whole: int = 0
    total: int = 0
    without_tokens: int = 0
    withheld: int = 0
    """Verdicts whose failing checks are left out."""

    def add_all(self, rollouts: str) -> None:
        """Add the pages of the runs and of their chosen rollouts."""
        self._put(["runs"], {}, {"runs": [run_info(run) for run in self.runs]})
        # Complete: static/embedded.js takes the columns of the runs that are compared.
        self._put(["compare"], {}, json.loads(encode(compare_runs(self.runs))))
        for run in self.runs:
            self.run = run
            self._add_run(rollouts)
        for a, b in itertools.permutations(self.runs, 2):
            self._compare_ends(a, b)

    def _add_run(self, rollouts: str) -> None:
        pairs = self._pairs()
        self.chosen = dict.fromkeys(self._choose(rollouts, pairs))
        self.whole += len(self.chosen)
        for rollout_id in self.chosen:
            self._add_rollout(rollout_id)
        for name in ("overview", "facets", "health", "checks", "cheats", "config", "run_log"):
            self._add(name)
        self._add_list()
        phases = (self._add("tasks") or {}).get("phases", [])
        for phase in {row["phase"] for row in phases}:
            self._add("tasks", phase=phase)
        if held := held_out(self.run):
            self._compare(of_a=held[0], of_b=held[-1])
        for before, after in pairs:
            self._compare(id_a=before, id_b=after)

    def _put(self, path: Sequence[str], query: Mapping[str, str], found: Any) -> None:
        raw = found if isinstance(found, bytes) else encode(self.redaction.value(self._named(found)))
        if len(self.packs[-1]) > PACK_BYTES:
            self.packs.append(bytearray())
        values = [f"{name}={value}" for name, value in sorted(query.items())]
        key = self.redaction.text("\n".join([*path, *values]))
        self.index[key] = (len(self.packs) - 1, len(self.packs[-1]), len(raw))
        self.packs[-1] += raw

    def _named(self, found: Any) -> Any:
        """Return a page with the names of run directories for their paths."""
        text = encode(found)
        for run in self.runs:
            text = text.replace(str(run.path).encode(), run.name.encode())
        return json.loads(text)

    def _answer(self, name: str, query: Mapping[str, str]) -> Any:
        """Return a page as JSON values or bytes, None where the run has no such page."""
        try:
            found = PAGES[name](self.context, self.run, Query(query))
        except InsituError:
            return None
        return found if isinstance(found, bytes) else self._withhold(json.loads(encode(found)))

    def _add(self, name: str, **query: str) -> Any:
        found = self._answer(name, query)
        if found is not None:
            self._put([self.run.name, name], query, found)
        return found

    def _withhold(self, page: dict[str, Any]) -> dict[str, Any]:
        verdict = page.get("verdict")
        if not self.checks and verdict and verdict["evidence"]:
            self.withheld += "turns" in page and "has" in page
            verdict["evidence"] = None
        return page

    def _add_list(self) -> None:
        """Add all rows of the list as one page, which static/embedded.js filters and sorts."""
        rows, cursor, count = [], "", 0
        while page := self._answer("rollouts", {"cursor": cursor}):
            rows += page["rows"]
            count, cursor = count or page["count"], page["next"]
            if not cursor:
                break
        self.total += count
        self._put([self.run.name, "rollouts"], {}, {"rows": rows, "next": None, "count": count})

    def _pairs(self) -> list[tuple[str, str]]:
        """Return rollouts of held-out tasks before and after training, changed ones first."""
        if not (held := held_out(self.run)):
            return []
        first, last = (place.rsplit(":", 1) for place in (held[0], held[-1]))
        pairs = compare_tasks(self.run, self.run, (first[0], int(first[1])), (last[0], int(last[1])))["pairs"]
        order = ("only_b", "better", "only_a", "worse", "both", "neither", "equal")
        pairs.sort(key=lambda pair: order.index(pair["cell"]))
        return [(pair["a"][0], pair["b"][0]) for pair in pairs[:MAX_PAIRS]]

    def _choose(self, rollouts: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """Return ids; raise ConfigError for one that the run has not."""
        with self.run.reader() as reader:
            ids = [row["id"] for row in reader.all("SELECT rollout_id AS id FROM rollouts ORDER BY rowid")]
        if rollouts == "all":
            return ids
        if rollouts.isdecimal():
            return ids[max(0, len(ids) - int(rollouts)) :]
        if rollouts:
            chosen = [name.strip() for name in rollouts.split(",") if name.strip()]
            if unknown := sorted(set(chosen) - set(ids)):
                raise ConfigError(f"--rollouts: the run has no rollout {unknown[0]}")
            return chosen
        overview = self._answer("overview", {}) or {}
        telling = [row["id"] for row in overview.get("telling", ())]
        return list(dict.fromkeys([*telling, *(name for pair in pairs for name in pair)]))

    def _add_rollout(self, rollout_id: str) -> None:
        """Add every tab of a rollout, and its group, step and task."""
        page = self._add("rollout", id=rollout_id)
        if page is None or page["row"] is None:
            return
        for name in ("diff", "log", "raw", "artifacts"):
            self._add(name, id=rollout_id)
        start: int | None = 0
        while start is not None:
            text = self._add("transcript", id=rollout_id, start=str(start)) or {"next": None}
            if start == 0:  # the comparison of two rollouts asks without a start
                self._put([self.run.name, "transcript"], {"id": rollout_id}, text)
            start = text["next"]
        if self.tokens:
            self._add_tokens(rollout_id, page)
        self._add_places(rollout_id, page["row"])

    def _add_places(self, rollout_id: str, row: Mapping[str, Any]) -> None:
        """Add group, step and task of a rollout once, and the comparisons that they link to."""
        place = {"phase": row["phase"], "step": str(row["step"]), "group": str(row["group"])}
        group = self._add_once("group", place)
        if row["account"] is not None:
            self._add_once("step", {"step": str(row["account"])})
        task = self._add_once("task", {"task": row["task"]})
        linked = [(group["reference"], member["id"]) for member in group["rollouts"]] if group else []
        rows = task["rollouts"] if task else []
        for side in ("eval", "train"):
            ids = [other["id"] for other in rows if other["phase"].startswith(side)]
            linked += [(ids[0], ids[-1])] if len(ids) > 1 else []
        for first, second in linked:
            if first != second and first in self.chosen and second in self.chosen:
                self._compare(id_a=first, id_b=second)

    def _add_once(self, name: str, query: Mapping[str, str]) -> Any:
        key = (self.run.name, name, *query.values())
        if key in self.added:
            return None
        self.added.add(key)
        return self._add(name, **query)

    def _add_tokens(self, rollout_id: str, page: Mapping[str, Any]) -> None:
        """Add the tokens of a rollout, unless their text has something to redact or is not known."""
        parts = [("segment", s["segment"], s["tokens"]) for s in page["segments"]]
        parts += [("turn", t["turn"], t["fresh"] + t["sampled"]) for t in page["turns"]]
        found: list[tuple[dict[str, str], bytes]] = []
        for kind, number, total in parts:
            text = ""
            for start in range(0, total, TOKENS):
                count = str(min(TOKENS, total - start))
                query = {"id": rollout_id, kind: str(number), "start": str(start), "count": count}
                raw = self._answer("tokens", query)
                if raw is None:
                    continue
                found.append((query, raw))
                text += "".join(decode(raw)[2])
            if self.redaction.hits(text) or (total and not text):
                self.without_tokens += 1
                return
        for query, raw in found:
            self._put([self.run.name, "tokens"], query, raw)
        for segment in page["segments"]:
            self._add("minimap", id=rollout_id, segment=str(segment["segment"]))

    def _compare(self, runs: str = "", **query: str) -> None:
        """Add a comparison of two sides or two rollouts, of the current run with itself or of `runs`."""
        given = {"runs": runs or self.run.name, **query}
        self._put(["compare"], given, json.loads(encode(compare(self.context, self.runs[0], Query(given)))))

    def _compare_ends(self, a: RunHandle, b: RunHandle) -> None:
        """Add the last evaluations of two runs task by task."""
        ends = [held_out(run, fewest=1)[-1:] for run in (a, b)]
        if all(ends):
            self._compare(f"{a.name},{b.name}", of_a=ends[0][0], of_b=ends[1][0])

    def left_out(self) -> str:
        """Return what the file holds and what was left out, in sentences."""
        parts = [f"{self.whole} of {self.total} rollouts are here whole"]
        parts.append("secrets, home paths, the host name and patterns of --redact are replaced")
        if not self.tokens:
            parts.append("tokens are left out")
        elif self.without_tokens:
            parts.append(f"tokens of {self.without_tokens} rollouts are left out: they cannot be redacted")
        if self.withheld:
            parts.append(f"failing checks of {self.withheld} verdicts are left out")
        return "; ".join([*parts, "files of agents are left out"]) + "."


def held_out(run: RunHandle, fewest: int = 2) -> list[str]:
    """Return the evaluations of a run in order as `PHASE:STEP`; empty when there are fewer than `fewest`."""
    try:
        phases = tasks_page(run, "train")["phases"]
    except InsituError:
        return []
    held = [f"{row['phase']}:{row['step']}" for row in phases if row["phase"].startswith("eval")]
    return held if len(held) >= fewest else []


def _document(pages: _Pages) -> str:
    """Return the file: policy, what was left out, the script, the data."""
    styles = [(STATIC / name).read_text("utf-8") for name in ("vendor/uPlot.min.css", "app.css")]
    plain = ("theme.js", "vendor/uPlot.iife.min.js")
    scripts = [*((STATIC / name).read_text("utf-8") for name in plain), bundle()]
    policy = _POLICY.format(scripts=_hashes(scripts), styles=_hashes(styles))
    packs = [encode(pages.index), *pages.packs]
    data = [base64.b64encode(zlib.compress(bytes(pack), 9)).decode() for pack in packs]
    names = ", ".join(run.name for run in pages.runs)
    title, note = html.escape(pages.redaction.text(names)), html.escape(pages.left_out())
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{title} · insitu</title><link rel="icon" href="{icon()}">',
            *(f"<style>{style}</style>" for style in styles),
            f"<script>{scripts[0]}</script></head><body>",
            f'<p class="exported" role="note"><b>Exported from {title}.</b> {note}</p>',
            '<div id="app"><p class="boot">Loading…</p></div>',
            '<noscript><p class="boot">This page needs JavaScript.</p></noscript>',
            *(f'<script type="application/octet-stream" class="pack">{pack}</script>' for pack in data),
            *(f"<script>{script}</script>" for script in scripts[1:]),
            "</body></html>",
        ]
    )


def _hashes(texts: Iterable[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
