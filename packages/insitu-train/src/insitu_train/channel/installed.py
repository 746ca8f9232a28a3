"""What is installed here, which two ends of a channel compare."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from insitu._version import __version__
from insitu.errors import TrainError, boundary
from insitu.registry import SATELLITES
from insitu.storage.files import sha256_of

_ALL = ("insitu", *(f"insitu_{name}" for name in SATELLITES))


@functools.cache
def code_identity(packages: tuple[str, ...] = _ALL) -> str:
    """Return version and digest of the installed insitu: checkouts of one version may differ."""
    found = hashlib.sha256()
    for package in packages:
        for root in (Path(spec.origin).parent for spec in [find_spec(package)] if spec and spec.origin):
            for file in sorted(root.rglob("*.py")):
                found.update(str(file.relative_to(root.parent)).encode() + b"\0" + file.read_bytes())
    return f"{__version__} ({found.hexdigest()[:12]})"


def torch_version() -> str:
    """Return torch's version without that of its CUDA."""
    return version("torch").partition("+")[0]


def weights_digest(folder: Path, kept: Path | None = None) -> str:
    """Return the hex SHA-256 over config.json and the weights of a model folder. Raises TrainError.

    The files are read once by a process while path, size and time of each stay. kept: file with what an
    earlier process found, which counts as long.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TrainError(f"{folder} has no model")
    names = [*files, *([config] if (config := folder / "config.json").exists() else [])]
    with boundary(TrainError, f"read {folder}"):
        found = tuple((str(path.absolute()), (s := path.stat()).st_size, s.st_mtime_ns) for path in names)
        if kept is None:
            return _digest_of(found)
        about, _, digest = kept.read_text().rpartition(" ") if kept.exists() else ("", "", "")
        if about != repr(found):
            digest = _digest_of(found)
            kept.write_text(f"{found!r} {digest}")
        return digest


@functools.lru_cache(maxsize=8)
def _digest_of(files: tuple[tuple[str, int, int], ...]) -> str:
    sums = [f"{Path(path).name} {sha256_of(Path(path))}" for path, _, _ in files]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()
