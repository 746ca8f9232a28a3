"""Addresses of the viewer's data: name of a page -> function of the request's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from insitu.storage import queries as sql
from insitu_view.web import findings, pages, rollout_page, token_page
from insitu_view.web.context import Context
from insitu_view.web.credit import StepCredit
from insitu_view.web.query import BadRequest, Query
from insitu_view.web.runs import RunHandle
from insitu_view.web.search import search_page

MAX_CHARS = 2_000_000
MAX_CAUSES = 30
Page = Callable[[Context, RunHandle, Query], Mapping[str, Any] | bytes]
HEAVY = frozenset({"step", "group", "rollout", "search", "transcript", "task"})
"""Pages that plan a step or decode text."""


def _overview(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    return pages.overview(run, query.whole("after", -1, least=-1))


def _step(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    return pages.step_page(run, context.credits, query.whole("step"))


def _group(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    words, _ = context.words_of(run)
    place = query.text("phase"), query.whole("step"), query.whole("group")
    return pages.group_page(run, context.credits, words, *place)


def _rollouts(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    filters = query.filters()
    limit = query.whole("limit", sql.PAGE, least=1, most=sql.PAGE)
    cursor = query.text("cursor", "", limit=1000)
    with run.reader() as reader:
        page = reader.page(filters, sort=query.text("sort", ""), cursor=cursor, limit=limit)
        # Counted once: a count reads every rollout that passes the filters.
        count = None if cursor else reader.count(filters)
    return {
        "rows": [pages.with_credit(row, _known_credit(context, run, row)) for row in page.rows],
        "next": page.next or None,
        "count": count,
    }


def _known_credit(context: Context, run: RunHandle, row: Mapping[str, Any]) -> StepCredit | None:
    return None if row["account"] is None else context.credits.known(run, row["account"])


def _facets(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    with run.reader() as reader:
        return {
            "facets": reader.all(sql.FACETS),
            "categories": reader.all(sql.CATEGORIES),
            "causes": reader.all(sql.WHY)[:MAX_CAUSES],
            "states": reader.all(sql.STATES),
            "sorts": list(sql.SORTS),
            "filters": list(sql.FILTERS),
        }


def _rollout(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    return rollout_page.rollout_page(run, context.credits, query.text("id"))


def _transcript(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    words, problem = context.words_of(run)
    found = rollout_page.transcript(
        run,
        words,
        query.text("id"),
        query.whole("start", 0),
        query.whole("count", rollout_page.MAX_TURNS, least=1, most=rollout_page.MAX_TURNS),
        query.whole("chars", rollout_page.DEFAULT_CHARS, least=1, most=MAX_CHARS),
    )
    return {**found, "problem": problem}


def _tokens(context: Context, run: RunHandle, query: Query) -> bytes:
    words, _ = context.words_of(run)
    start = query.whole("start", 0)
    count = query.whole("count", 4096, least=1, most=token_page.MAX_TOKENS)
    turn = query.whole("turn", -1, least=-1)
    with run.reader() as reader:
        if turn >= 0:
            return token_page.turn_page(reader, words, query.text("id"), turn, start, count)
        return token_page.token_page(reader, words, query.text("id"), query.whole("segment", 0), start, count)


def _minimap(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    with run.reader() as reader:
        return token_page.minimap(reader, query.text("id"), query.whole("segment", 0))


def _tasks(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    return pages.tasks_page(run, query.text("phase", "train"))


def _task(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    words, _ = context.words_of(run)
    return pages.task_page(run, words, query.text("task"))


def _search(context: Context, run: RunHandle, query: Query) -> Mapping[str, Any]:
    return search_page(run, *context.words_of(run), query.text("text"), query.whole("before", 2**53))


JsonPage = Callable[[Context, RunHandle, Query], Mapping[str, Any]]
Named = Callable[[RunHandle, str], Mapping[str, Any]]


def _by_id(page: Named) -> Callable[[Context, RunHandle, Query], Mapping[str, Any]]:
    return lambda context, run, query: page(run, query.text("id"))


def _of_run(
    page: Callable[[RunHandle], Mapping[str, Any]],
) -> Callable[[Context, RunHandle, Query], Mapping[str, Any]]:
    return lambda context, run, query: page(run)


def _reused(name: str, page: JsonPage) -> JsonPage:
    return lambda context, run, query: context.reused(
        run, (name, query.key), lambda: page(context, run, query)
    )


PAGES: Mapping[str, Page] = {
    "overview": _reused("overview", _overview),
    "step": _step,
    "group": _group,
    "rollouts": _rollouts,
    "facets": _reused("facets", _facets),
    "rollout": _rollout,
    "search": _search,
    "transcript": _transcript,
    "tokens": _tokens,
    "minimap": _minimap,
    "tasks": _reused("tasks", _tasks),
    "task": _task,
    "diff": _by_id(rollout_page.diff_page),
    "log": _by_id(rollout_page.log_page),
    "raw": _by_id(rollout_page.raw_page),
    "artifacts": _by_id(rollout_page.artifacts),
    "run_log": _of_run(rollout_page.run_log),
    "health": _reused("health", _of_run(findings.health_page)),
    "checks": _reused("checks", _of_run(findings.checks_page)),
    "cheats": _reused("cheats", _of_run(findings.cheats_page)),
    "config": _of_run(pages.config_page),
}


def compare(context: Context, _: RunHandle, query: Query) -> Mapping[str, Any]:
    """Compare runs (`runs=A,B`), tasks of two sides (`of_a=PHASE:STEP`) or two rollouts (`id_a`, `id_b`)."""
    names = [name for name in query.text("runs").split(",") if name]
    if not 1 <= len(names) <= 8:
        raise BadRequest("the parameter runs takes 1 to 8 names")
    runs = [context.runs.named(name) for name in names]
    if query.text("id_a", ""):
        return findings.align(runs[0], runs[-1], query.text("id_a"), query.text("id_b"))
    if query.text("of_a", ""):
        return findings.compare_tasks(runs[0], runs[-1], _side(query, "of_a"), _side(query, "of_b"))
    return findings.compare_runs(runs)


def _side(query: Query, name: str) -> tuple[str, int]:
    phase, _, step = query.text(name).rpartition(":")
    if not phase or not step.isdecimal():
        raise BadRequest(f"the parameter {name} is PHASE:STEP, e.g. eval_after:24")
    return phase, int(step)


def download(context: Context, run: RunHandle, query: Query) -> tuple[str, bytes]:
    """Return a changed file (`file=`) or an artifact (`artifact=`) of a rollout, with its name."""
    rollout_id, path = query.text("id"), query.text("file", "", limit=600)
    if path:
        return path.rsplit("/", 1)[-1], rollout_page.changed_file(run, rollout_id, path)
    path = query.text("artifact", limit=600)
    return path.rsplit("/", 1)[-1], rollout_page.artifact(run, rollout_id, path)
