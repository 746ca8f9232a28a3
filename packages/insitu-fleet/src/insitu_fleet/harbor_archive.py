"""Archives that carry files to and from sandboxes of the harbor backend."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path, PurePosixPath

from insitu.sandbox.tree import MAX_DEPTH, TreeTooLarge, parts_of
from insitu.types import FileEntry, Tree


def pack(files: Tree) -> bytes:
    """Return a tar archive that names every folder, so that tar replaces a link in place of one."""
    packed, made = io.BytesIO(), set[PurePosixPath]()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, entry in files.items():
            pure = PurePosixPath(*parts_of(path))
            for folder in [each for each in reversed(pure.parents) if each.parts and each not in made]:
                made.add(folder)
                info = tarfile.TarInfo(str(folder))
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            info = tarfile.TarInfo(str(pure))
            info.size, info.mode = len(entry.content), 0o755 if entry.executable else 0o644
            archive.addfile(info, io.BytesIO(entry.content))
    return packed.getvalue()


def unpack(packed: bytes, max_bytes: int, max_files: int) -> Tree:
    """Return the regular files of an archive whose paths stay inside. Raises TreeTooLarge."""
    found: dict[str, FileEntry] = {}
    entries, size = 0, 0
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                entries += 1
                name = PurePosixPath(member.name)
                size += member.size
                if entries > 4 * max_files + 1000 or size > max_bytes:
                    raise TreeTooLarge("work folder is over a cap of entries or bytes")
                entry = _entry(archive, member) if len(name.parts) <= MAX_DEPTH + 1 else None
                if entry is not None:
                    size += len(entry.content) - member.size  # 0 for a hard link
                    found[str(name)] = entry
    except tarfile.TarError as error:
        raise TreeTooLarge(f"work folder is over a cap: its archive ends early ({error})") from error
    if len(found) > max_files:
        raise TreeTooLarge("work folder has too many files")
    return dict(sorted(found.items()))


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo) -> FileEntry | None:
    name = PurePosixPath(member.name)
    try:
        member.name.encode()
        if name.is_absolute() or ".." in name.parts or not (member.isreg() or member.islnk()):
            return None
        reader = archive.extractfile(member)
    except (UnicodeEncodeError, KeyError):
        return None
    content = reader.read() if reader is not None else b""
    return FileEntry(content=content, executable=bool(member.mode & 0o100))


def packed_copy(source: Path, target: str, cache: Path) -> Path:
    """Return a compressed archive of a host file or folder as it is to lie at `target`; made once.

    Its entries belong to root and keep links and modes.
    """
    key = f"{source.resolve()} {source.stat().st_mtime_ns} {target}"
    made = cache / "harbor" / f"{source.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.tar.gz"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    part = made.with_name(f".{made.name}-{os.getpid()}")
    try:
        with gzip.open(part, "wb", compresslevel=1) as file, tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(source.resolve(), arcname=target.lstrip("/"), filter=_of_root)
        part.rename(made)
    finally:
        part.unlink(missing_ok=True)
    return made


def _of_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info
