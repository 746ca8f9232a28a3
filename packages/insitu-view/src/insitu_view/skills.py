"""`insitu skills`: text files by which a coding agent starts, checks, watches, explains and compares runs.

They name verbs only, with `--json` where a program reads: an agent needs no more than a shell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from insitu.errors import ConfigError, boundary
from insitu.storage.files import write_text

AGENTS: Mapping[str, str] = {
    "claude-code": ".claude/skills",
    "codex": ".agents/skills",
    "gemini-cli": ".agents/skills",
    "opencode": ".agents/skills",
    "pi": ".agents/skills",
    "qwen-code": ".qwen/skills",
}
"""Coding agent -> folder of a project in which it looks for skills."""


def skill_texts() -> dict[str, str]:
    """Return the text of each skill by name."""
    found = sorted((files("insitu_view") / "skill_files").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".md"): file.read_text() for file in found if file.name.endswith(".md")}


def write_skills(folder: Path, agents: Sequence[str], *, force: bool = False) -> list[Path]:
    """Write the skills for these agents, all known ones without any, and return their files.

    Raises ConfigError for an unknown agent, and for a file that was changed unless `force`.
    """
    for agent in agents:
        if agent not in AGENTS:
            raise ConfigError(f"no skills for {agent!r}; there are for: {', '.join(AGENTS)}")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    places = dict.fromkeys(AGENTS[agent] for agent in agents or AGENTS)
    wanted = {
        folder / place / name / "SKILL.md": text for place in places for name, text in skill_texts().items()
    }
    with boundary(ConfigError, "cannot write skills"):
        changed = [path for path, text in wanted.items() if path.exists() and path.read_text() != text]
        if changed and not force:
            raise ConfigError(f"{changed[0]} was changed, or is of another version: --force replaces it")
        for path, text in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
    return list(wanted)
