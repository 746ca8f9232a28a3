"""Build the documentation into site/: the pages of docs/, and the configuration and API reference.

Links to files outside of docs/ (examples, CONTRIBUTING) are changed to copies of them. Any warning of the
builder fails the build.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PUBLIC = ("insitu", "insitu_lab.testing")
"""Modules whose `__all__` is the API reference."""


def configuration() -> str:
    """Return the page that lists every key of the configuration."""
    tables = importlib.import_module("insitu.config").table_classes()
    page = [
        "# Configuration",
        "TOML with one table per part. `table.key=value` on the command line overrides a key; "
        "`--dry-run` prints all keys of a run. Relative paths start at the current folder.",
    ]
    for table, kind in tables.items():
        page.append(f"## {table}\n\n{inspect.getdoc(kind) or ''}")
        page.append("| key | default | meaning |\n|---|---|---|\n" + "\n".join(_rows(kind)))
    return "\n\n".join(page) + "\n"


def _rows(table: Any, prefix: str = "") -> list[str]:
    described = importlib.import_module("insitu.config.base").description
    rows = []
    for name, field in table.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            rows += _rows(field.annotation, f"{prefix}{name}.")
            continue
        default = json.dumps(field.get_default(call_default_factory=True), default=str, ensure_ascii=False)
        meaning = described(field).replace("|", "\\|")
        rows.append(f"| `{prefix}{name}` | `{default}` | {meaning} |")
    return rows


def metrics() -> str:
    """Return the page that lists every metric of a run."""
    names = importlib.import_module("insitu_view.tracking.names")
    page = ["# Metrics", (inspect.getdoc(names) or "").partition("\n\n")[2]]
    cells = [(sent, name, text.replace("|", "\\|")) for sent, name, text in names.table()]
    rows = [f"| `{sent}` | `{name}` | {text} |" for sent, name, text in cells]
    page.append("| sent as | in metrics.jsonl | meaning |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(page) + "\n"


def api() -> str:
    """Return the page of the public names: signature, docstring, fields and public methods."""
    page = ["# API reference"]
    for module in PUBLIC:
        found = importlib.import_module(module)
        page.append(f"## {module}\n\n{inspect.getdoc(found) or ''}")
        page += [_entry(name, getattr(found, name)) for name in found.__all__]
    return "\n\n".join(page) + "\n"


def _entry(name: str, item: Any) -> str:
    if not (inspect.isclass(item) or inspect.isfunction(item)):
        return f"### {name}\n\n```python\n{name} = {item}\n```"
    parts = [f"### {name}\n\n```python\n{_signature(name, item)}\n```", inspect.getdoc(item) or ""]
    if inspect.isclass(item):
        parts += [f"- `{field}`: {text}" for field, text in _fields(item).items()]
        for method, value in vars(item).items():
            if method.startswith("_") or not (callable(value) or isinstance(value, property)):
                continue
            function = value.fget if isinstance(value, property) else value
            signature = method if isinstance(value, property) else _signature(method, function)
            parts.append(f"- `{signature}`: {(inspect.getdoc(function) or '').partition(chr(10))[0]}")
    return "\n\n".join(part for part in parts if part)


def _signature(name: str, item: Any) -> str:
    prefix = "async def " if inspect.iscoroutinefunction(item) else ""
    try:
        return f"{prefix}{name}{inspect.signature(item)}"
    except (TypeError, ValueError):
        return name


def _fields(item: type) -> dict[str, str]:
    """Return the fields of a class with the strings below them."""
    try:
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(item))).body[0].body  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError):
        return {}
    texts = {}
    for field, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = str(after.value.value) if documented else ast.unparse(field.annotation)  # type: ignore[union-attr]
            texts[field.target.id] = " ".join(text.split())
    return {name: text for name, text in texts.items() if not name.startswith("_")}


def collect(folder: Path) -> None:
    """Write all pages into `folder`."""
    shutil.copytree(ROOT / "docs", folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    (folder / "contributing.md").write_text(contributing, encoding="utf-8")
    for page in folder.rglob("*.md"):
        text = page.read_text(encoding="utf-8").replace("](../examples/", "](examples/")
        page.write_text(text.replace("](../CONTRIBUTING.md", "](contributing.md"), encoding="utf-8")
    (folder / "reference").mkdir()
    (folder / "reference" / "configuration.md").write_text(configuration(), encoding="utf-8")
    (folder / "reference" / "metrics.md").write_text(metrics(), encoding="utf-8")
    (folder / "reference" / "api.md").write_text(api(), encoding="utf-8")


def main() -> int:
    sys.path[:0] = [str(path) for path in (ROOT / "src", *(ROOT / "packages").glob("*/src"))]
    with tempfile.TemporaryDirectory(prefix="insitu-docs-") as name:
        work = Path(name)
        collect(work / "docs")
        shutil.copy(ROOT / "mkdocs.yml", work)
        build = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
        done = subprocess.run(build, cwd=work, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            print(done.stdout + done.stderr.partition("Traceback")[0])
            return 1
        shutil.rmtree(ROOT / "site", ignore_errors=True)
        shutil.copytree(work / "site", ROOT / "site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
