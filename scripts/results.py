"""Write docs/results.md from the records in benchmarks/results, and the counts of docs/workflows.md.

`python scripts/results.py` writes the pages. `--check` compares them and looks up the figures that the README
and docs quote. `--record NAME COMMAND...` runs a command whose last line on stdout is JSON and stores it.
`page.md` beside the records is the template (Jinja): prose, and tables with figures taken from records.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), *map(str, (ROOT / "packages").glob("*/src"))]
RECORDS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
STATUSES = ("run", "contract", "differs", "needs", "open")
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| (\w+) \| ([^|]+) \|$", re.MULTILINE)
"""A row of docs/workflows.md: number, what it is, status, test or reason."""
FIGURE = re.compile(
    r"(?<![\w.])\d[\d,]*(?:\.\d+)? (?:ms|\u00d7)|(?<![\w.])\d+\.\d+ %|(?<![\w.])0\.\d{3}(?!\d)"
)
"""Measured figures in prose: milliseconds, a factor, a percentage with decimals, a rate of three decimals."""
REPORTS = {f"{name}.md" for name in ("results", "asynchronous", "servers", "sft", "DESIGN")}
"""Pages with tables of their own figures, each with command and date."""


def records() -> dict[str, Any]:
    """Return name -> record; names as in the template, with underscores."""
    paths = sorted(RECORDS.glob("*.json"))
    return {path.stem.replace("-", "_"): json.loads(path.read_text(encoding="utf-8")) for path in paths}


def duration(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes} min {rest} s"


def thousands(number: int) -> str:
    return f"{number:,}"


def page() -> str:
    """Return the text of docs/results.md."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(RECORDS),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"duration": duration, "thousands": thousands}
    found = records()
    return environment.get_template("page.md").render(found, records=found)


def counted(text: str) -> str:
    """Return the text of docs/workflows.md with the table below `<!-- counts -->` made from its rows."""
    lines = [f"| | rows | {' | '.join(STATUSES)} |", "|---" * (len(STATUSES) + 2) + "|"]
    systems = {part[:2]: ROW.findall(part) for part in text.split("\n### Rows of ")[1:]}
    for name, rows in {**systems, "all": ROW.findall(text)}.items():
        numbers = [len(rows), *(sum(row[2] == status for row in rows) for status in STATUSES)]
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    table = "\n".join(lines)
    return re.sub(r"(<!-- counts -->\n)(?:\|.*\n)*", lambda found: f"{found[1]}{table}\n", text)


def pages() -> dict[Path, str]:
    """Return path -> text of every page that is made, and of every picture."""
    rows = PAGE.with_name("workflows.md")
    of_rows = {rows: counted(rows.read_text(encoding="utf-8"))} if rows.exists() else {}
    scale = PAGE.with_name("scale.md")
    of_rows |= {scale: cluster(scale.read_text(encoding="utf-8"))} if scale.exists() else {}
    return {PAGE: page(), **of_rows, **pictures()}


def cluster(text: str) -> str:
    """Return the text of docs/scale.md with the table below `<!-- cluster -->` that its record has."""
    found = records().get("scale_cluster", {"result": {"lines": []}})["result"]["lines"]
    table = "\n".join(["| what | how much | from where |", "|---|---|---|", *found])
    return re.sub(r"(<!-- cluster -->\n)(?:\|.*\n)*", lambda made: f"{made[1]}{table}\n", text)


def pictures() -> dict[Path, str]:
    """Return path -> SVG of every picture that is drawn from a record."""
    found = records()
    if "transfer" not in found:
        return {}
    from benchmarks._transfer_report import heat_map

    return {PAGE.with_name("transfer.svg"): heat_map(found["transfer"]["result"]["cells"])}


def unknown_figures() -> list[str]:
    """Return figures in README and docs that the page does not have."""
    known = PAGE.read_text(encoding="utf-8")
    pages = [ROOT / "README.md", *(path for path in (ROOT / "docs").glob("*.md") if path.name not in REPORTS)]
    return [
        f"{path.relative_to(ROOT)} quotes {figure!r}, which is not in docs/results.md"
        for path in pages
        for figure in FIGURE.findall(path.read_text(encoding="utf-8"))
        if not re.search(rf"(?<![\d.]){re.escape(figure)}", known)
    ]


def record(name: str, command: list[str]) -> None:
    """Run a command and store its result."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    commit = ["git", "describe", "--always", "--dirty"]
    found = {
        "command": " ".join(command),
        "machine": f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.run(commit, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip(),
        "load_average": os.getloadavg()[0],
        "result": json.loads(done.stdout.splitlines()[-1]),
    }
    text = json.dumps(found, indent=2, ensure_ascii=False)
    (RECORDS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--record"]:
        record(arguments[1], arguments[2:])
    elif arguments == ["--check"]:
        wrong = unknown_figures()
        wrong += [
            f"docs/{path.name} differs from its records or rows: run python scripts/results.py"
            for path, made in pages().items()
            if not path.exists() or path.read_text(encoding="utf-8") != made
        ]
        print("\n".join(wrong), end="\n" if wrong else "")
        return 1 if wrong else 0
    else:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
