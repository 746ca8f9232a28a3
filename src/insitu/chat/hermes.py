"""`model.renderer = "hermes"`: a model folder with a chat template that has a place for tools.

For models whose own has none and that write turns between <|im_start|> and <|im_end|>, such as SmolLM2. What
is copied from a model folder, into checkpoints and exports, takes the template along.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from insitu.storage.temp_dirs import cache_folder, keep, part_folder

TEMPLATE = "chat_template.jinja"


def hermes_folder(path: str, say: Callable[[str], None]) -> Path:
    """Return a folder in the cache with links to the files of a model folder, and the template."""
    template = Path(__file__).with_name("hermes.jinja").read_bytes()
    found = {
        f: f.stat() for f in sorted(Path(path).absolute().iterdir()) if f.is_file() and f.name != TEMPLATE
    }
    state = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in found.items()]
    key = hashlib.sha256(template + repr(state).encode()).hexdigest()  # a folder that changed is another
    folder = cache_folder() / "models" / f"hermes-{key[:24]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with part_folder(folder) as part:
            for file in found:
                (part / file.name).symlink_to(file)
            (part / TEMPLATE).write_bytes(template)
            keep(part, folder)
    return folder
