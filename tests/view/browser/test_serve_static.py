"""The viewer's static files: vendored as they stand, no HTML sink, valid, small, easy to concatenate."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import pytest
from web_lab import viewing

from insitu.agents.install import find_node
from insitu.errors import SetupError
from insitu_view.web import serve

STATIC = Path(serve.__file__).parent / "static"
OWN = sorted(path for path in STATIC.rglob("*.js") if path.parent.name != "vendor")
SINKS = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "dangerouslySetInnerHTML", "document.write", "DOMParser",
    "createContextualFragment", "setHTMLUnsafe", "eval(", "new Function", "setTimeout(\"", "srcdoc",
)  # fmt: skip
IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "(\.{1,2}/[\w/.-]+)";$')


def served() -> list[Path]:
    return [path for path in STATIC.rglob("*") if path.is_file() and path.suffix in serve._TYPES]


def test_vendored_files_are_those_of_the_packages() -> None:
    rows = re.findall(
        r"^\| (\S+) \|.*\| ([0-9a-f]{64}) \|$", (STATIC / "vendor/VENDORED.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 3
    for name, digest in rows:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
    assert {path.name for path in (STATIC / "vendor").iterdir()} == {name for name, _ in rows} | {
        "LICENSES",
        "VENDORED.md",
    }


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.relative_to(STATIC).as_posix())
def test_a_script_has_no_html_sink_and_a_readable_size(path: Path) -> None:
    text = path.read_text()
    assert [sink for sink in SINKS if sink in text] == []
    assert len(text.splitlines()) <= 400


def test_no_page_has_inline_script_or_style() -> None:
    page = (STATIC / "index.html").read_text()
    assert "<style" not in page
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"\son\w+=|\sstyle=", page)


@pytest.mark.slow
def test_scripts_parse() -> None:
    try:
        node = find_node((20, 0))
    except SetupError:
        pytest.skip("no Node 20 here: scripts/setup test")
    for path in OWN:
        kind = [] if path.name == "theme.js" else ["--input-type=module"]
        done = subprocess.run(
            [node, "--check", *kind, "-"], input=path.read_bytes(), capture_output=True, timeout=60
        )
        assert done.returncode == 0, f"{path.name}: {done.stderr.decode()}"


def test_modules_can_be_concatenated() -> None:
    """An exported report is one script of the same modules: plain imports of what exists, no cycle."""
    needs: dict[Path, set[Path]] = {}
    exports: dict[Path, set[str]] = {}
    for path in OWN:
        text = path.read_text()
        exports[path] = set(
            re.findall(r"^export (?:async )?(?:function|const|class|let) (\w+)", text, re.MULTILINE)
        )
        assert len(re.findall(r"^export", text, re.MULTILINE)) == len(exports[path])
        lines = [line for line in text.splitlines() if re.match(r"import\b", line)]
        assert all(IMPORT.match(line) for line in lines), path.name
        assert "import(" not in text
        needs[path] = {(path.parent / match[2]).resolve() for line in lines if (match := IMPORT.match(line))}
    for path in OWN:
        for line in path.read_text().splitlines():
            match = IMPORT.match(line)
            target = (path.parent / match[2]).resolve() if match else None
            if match and target in exports:
                assert set(match[1].split(", ")) <= exports[target], f"{path.name}: {line}"
    done: set[Path] = {(STATIC / "vendor/preact-htm.module.js").resolve()}
    while rest := [path for path in OWN if path not in done]:
        ready = [path for path in rest if needs[path] <= done]
        assert ready, f"import cycle among {[path.name for path in rest]}"
        done.update(ready)


async def test_what_is_served_is_small_and_sent_once(tmp_path: Path) -> None:
    """All pages together stay below 200 kB; an unchanged file is not sent again."""
    (tmp_path / "runs").mkdir()
    total = 0
    async with viewing(tmp_path / "runs") as client:
        for path in served():
            name = "" if path.name == "index.html" else path.relative_to(STATIC).as_posix()
            status, body, answer = await client.get(f"/{name}")
            assert (status, body) == (200, path.read_bytes())
            total += int(answer.headers["Content-Length"])
        headers = {"Authorization": f"Bearer {client.viewer.token}", "If-None-Match": answer.headers["ETag"]}
        async with client.session.get(f"{client.origin}/{name}", headers=headers) as again:
            assert (again.status, await again.read()) == (304, b"")
    assert total < 135_000
