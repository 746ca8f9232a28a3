"""`insitu view RUN --export FILE`: the pages of one run in one file that opens from disk.

The file holds what the server would answer to each path of its pages (routes.PAGES), redacted, and the same
modules as one inline script; static/embedded.js answers from them.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from insitu.errors import ConfigError, InsituError, SetupError
from insitu.storage.logs import SECRET
from insitu.view.web.context import Context
from insitu.view.web.findings import compare_tasks
from insitu.view.web.query import Query
from insitu.view.web.routes import PAGES, compare
from insitu.view.web.runs import RunHandle, Runs, run_info
from insitu.view.web.serve import STATIC, encode

PACK_BYTES = 4 << 20
"""Uncompressed size after which another pack begins: a page decompresses one pack."""
TOKENS = 4096
"""Tokens of one page, as PAGE_TOKENS of static/tokens_strip.js."""
MAX_PAIRS = 12
_KEYS = re.compile(r"\b(?:sk-|gh[opsu]_|github_pat_|hf_|xox[abp]-|AKIA)[A-Za-z0-9_-]{16,}")
_HOMES = re.compile(r"/(?:home|Users)/[^/\s\"'`:;,<>()\\]+")
_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "(\.{1,2}/[\w/.-]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class|let) (\w+))", re.MULTILINE)
_NAMES = re.compile(r"export\{([\w $,]+)\};?\s*$")
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; base-uri 'none';"
    " form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of one export."""

    paths: Sequence[Path]
    file: Path
    rollouts: str
    """Empty = the telling ones and pairs before and after; a number = the newest; ids with commas; `all`."""
    redact: Sequence[str]
    tokens: bool
    checks: bool
    """Keep failing checks of verdicts: they show hidden tests."""
    max_mib: int


def export(options: ExportOptions, out: TextIO) -> None:
    """Write the file. Raises InsituError, also when the file would be larger than `max_mib`."""
    runs = Runs(options.paths)
    if len(runs.all()) != 1:
        raise ConfigError(f"--export takes one run, and there are {len(runs.all())} at the given paths")
    pages = _Pages(
        Context(runs=runs), runs.all()[0], _Redaction(options.redact), options.tokens, options.checks
    )
    pages.add_all(options.rollouts)
    body = _document(pages).encode("utf-8", "replace")
    if len(body) > options.max_mib << 20:
        raise ConfigError(
            f"{options.file} would have {len(body) / (1 << 20):.1f} MiB, more than --max-mib"
            f" {options.max_mib}: choose fewer --rollouts, or add --no-tokens"
        )
    try:
        options.file.write_bytes(body)
    except OSError as error:
        raise SetupError(f"cannot write {options.file}: {error.strerror}") from error
    print(f"{options.file}: {len(body) / (1 << 20):.1f} MiB. {pages.left_out()}", file=out)


class _Redaction:
    """Replacement of secrets, home paths, the host name and chosen patterns in text."""

    def __init__(self, chosen: Sequence[str]) -> None:
        """Take regular expressions; raise ConfigError for one that is not valid."""
        self._patterns = [(SECRET, "***"), (_KEYS, "***"), (_HOMES, "~")]
        home, host = str(Path.home()), socket.gethostname()
        if home != "/":
            self._patterns.append((re.compile(re.escape(home) + r"(?![\w.-])"), "~"))
        if len(host) > 2 and host != "localhost":
            self._patterns.append((re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])"), "HOST"))
        for text in chosen:
            try:
                self._patterns.append((re.compile(text), "***"))
            except re.error as error:
                raise ConfigError(f"--redact {text} is not a regular expression: {error}") from error

    def text(self, text: str) -> str:
        for pattern, instead in self._patterns:
            text = pattern.sub(instead, text)
        return text

    def hits(self, text: str) -> bool:
        """Return whether something in a text would be replaced."""
        return any(pattern.search(text) for pattern, _ in self._patterns)

    def value(self, value: Any) -> Any:
        """Return JSON with every text and key replaced."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list) else value


@dataclass(slots=True)
class _Pages:
    """Answers of the viewer's pages, packed, by path and parameters."""

    context: Context
    run: RunHandle
    redaction: _Redaction
    tokens: bool
    checks: bool
    index: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Path and parameters -> pack, offset, length."""
    packs: list[bytearray] = field(default_factory=lambda: [bytearray()])
    chosen: dict[str, None] = field(default_factory=dict)
    """Ids of the rollouts that are there whole, in order."""
    added: set[tuple[str, ...]] = field(default_factory=set)
    """Groups, steps and tasks that are there."""
    total: int = 0
    without_tokens: int = 0
    withheld: int = 0
    """Verdicts whose failing checks are left out."""

    def add_all(self, rollouts: str) -> None:
        """Add the pages of the run and of the chosen rollouts."""
        self._put(["runs"], {}, {"runs": [run_info(self.run)]})
        pairs = self._pairs()
        self.chosen = dict.fromkeys(self._choose(rollouts, pairs))
        for rollout_id in self.chosen:
            self._add_rollout(rollout_id)
        for name in ("overview", "facets", "health", "cheats", "config", "run_log"):
            self._add(name)
        self._add_list()
        phases = (self._add("tasks") or {}).get("phases", [])
        for phase in {row["phase"] for row in phases}:
            self._add("tasks", phase=phase)
        self._compare()
        for before, after in pairs:
            self._compare(id_a=before, id_b=after)

    def _put(self, path: Sequence[str], query: Mapping[str, str], found: Any) -> None:
        raw = found if isinstance(found, bytes) else encode(self.redaction.value(found))
        if len(self.packs[-1]) > PACK_BYTES:
            self.packs.append(bytearray())
        values = [f"{name}={value}" for name, value in sorted(query.items())]
        key = self.redaction.text("\n".join([*path, *values]))
        self.index[key] = (len(self.packs) - 1, len(self.packs[-1]), len(raw))
        self.packs[-1] += raw

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
        self.total = count
        self._put([self.run.name, "rollouts"], {}, {"rows": rows, "next": None, "count": count})

    def _held_out(self) -> list[tuple[str, int]]:
        """Return phase and step of each evaluation; empty when there are fewer than two."""
        page = self._answer("tasks", {"phase": "train"}) or {"phases": []}
        held = [(row["phase"], row["step"]) for row in page["phases"] if row["phase"].startswith("eval")]
        return held if len(held) > 1 else []

    def _pairs(self) -> list[tuple[str, str]]:
        """Return rollouts of held-out tasks before and after training, changed ones first."""
        if not (held := self._held_out()):
            return []
        pairs = compare_tasks(self.run, self.run, held[0], held[-1])["pairs"]
        pairs.sort(key=lambda pair: ("only_b", "only_a").index(pair["cell"]) if "only" in pair["cell"] else 2)
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
        if (name, *query.values()) in self.added:
            return None
        self.added.add((name, *query.values()))
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
                text += text_of(raw)
            if self.redaction.hits(text) or (total and not text):
                self.without_tokens += 1
                return
        for query, raw in found:
            self._put([self.run.name, "tokens"], query, raw)
        for segment in page["segments"]:
            self._add("minimap", id=rollout_id, segment=str(segment["segment"]))

    def _compare(self, **ids: str) -> None:
        """Add the comparison of the run with itself: before and after, or two rollouts."""
        asked = [ids]
        if not ids and (held := self._held_out()):
            (phase_a, step_a), (phase_b, step_b) = held[0], held[-1]
            asked.append({"of_a": f"{phase_a}:{step_a}", "of_b": f"{phase_b}:{step_b}"})
        for query in asked:
            given = {"runs": self.run.name, **query}
            self._put(["compare"], given, json.loads(encode(compare(self.context, self.run, Query(given)))))

    def left_out(self) -> str:
        """Return what the file holds and what was left out, in sentences."""
        parts = [f"{len(self.chosen)} of {self.total} rollouts are here whole"]
        parts.append("secrets, home paths, the host name and patterns of --redact are replaced")
        if not self.tokens:
            parts.append("tokens are left out")
        elif self.without_tokens:
            parts.append(f"tokens of {self.without_tokens} rollouts are left out: they cannot be redacted")
        if self.withheld:
            parts.append(f"failing checks of {self.withheld} verdicts are left out")
        return "; ".join([*parts, "files of agents are left out"]) + "."


def text_of(page: bytes) -> str:
    """Return the text of a page of tokens."""
    size = int.from_bytes(page[:4], "little")
    place = json.loads(page[4 : 4 + size])["text"]
    start = 4 + size + int(place["offset"])
    return page[start : start + int(place["bytes"])].decode("utf-8", "replace")


def _document(pages: _Pages) -> str:
    """Return the file: policy, what was left out, the script, the data."""
    styles = [(STATIC / name).read_text("utf-8") for name in ("vendor/uPlot.min.css", "app.css")]
    names = ("theme.js", "vendor/uPlot.iife.min.js")
    scripts = [*((STATIC / name).read_text("utf-8") for name in names), bundle()]
    policy = _POLICY.format(scripts=_hashes(scripts), styles=_hashes(styles))
    packs = [encode(pages.index), *pages.packs]
    data = [base64.b64encode(zlib.compress(bytes(pack), 9)).decode() for pack in packs]
    title, note = html.escape(pages.redaction.text(pages.run.name)), html.escape(pages.left_out())
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{title} · insitu</title><link rel="icon" href="{_icon()}">',
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


def _icon() -> str:
    return "data:image/svg+xml;base64," + base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()


def bundle() -> str:
    """Return the modules as one script: each a function that returns its exports, after those it imports."""
    order: list[Path] = []
    for name in ("embedded.js", "main.js"):  # main.js draws at once, so the data comes first
        _visit(STATIC / name, order)
    parts = ['"use strict";', *(_module(path) for path in order)]
    return "\n".join(parts).replace('src="icon.svg"', f'src="{_icon()}"')


def _imports(path: Path) -> Iterator[Path]:
    for match in _IMPORT.finditer(path.read_text("utf-8")):
        yield (path.parent / match[2]).resolve()


def _visit(path: Path, order: list[Path]) -> None:
    if path in order:
        return
    for needed in _imports(path):
        _visit(needed, order)
    order.append(path)


def _module(path: Path) -> str:
    text = path.read_text("utf-8")
    if named := _NAMES.search(text):  # vendored: export{a as h,b as html}
        pairs = [pair.split(" as ") for pair in named[1].split(",")]
        exported = ", ".join(f"{shown}: {held}" for held, shown in pairs)
        text = text[: named.start()]
    else:
        exported = ", ".join(match[2] for match in _EXPORT.finditer(text))
    text = _EXPORT.sub(r"\1", text)
    text = _IMPORT.sub(
        lambda match: f"const {{ {match[1]} }} = {_name((path.parent / match[2]).resolve())};", text
    )
    return f"const {_name(path)} = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();"


def _name(path: Path) -> str:
    return "m_" + re.sub(r"\W", "_", path.relative_to(STATIC.resolve()).as_posix())
