"""Size is a design tool: functions of at most 60 lines, files of at most 400 (500 is a hard stop)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FUNCTION_LINES, FILE_WARN, FILE_STOP = 60, 400, 500


def problems(path: Path) -> list[str]:
    """What is too long in one file; a line that starts with `warning` does not fail the check."""
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    found = []
    if lines > FILE_STOP:
        found.append(f"{path}: {lines} lines, at most {FILE_STOP}")
    elif lines > FILE_WARN:
        found.append(f"warning: {path}: {lines} lines, better {FILE_WARN}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"
                )
    return found


def main(folders: list[str]) -> int:
    found = [
        line for folder in folders for path in sorted(Path(folder).rglob("*.py")) for line in problems(path)
    ]
    print("\n".join(found))
    return int(any(not line.startswith("warning") for line in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
