"""The small agent of the demo: one file, standard library only."""

from __future__ import annotations

from pathlib import Path

from insitu.agents.recipe import Recipe, read_files

SCRIPT_AGENT = Path(__file__).with_name("script_agent.py")

RECIPE = Recipe(
    name="script",
    command=("python3", "-S", "-E", "{files}/script_agent.py"),
    files=read_files([SCRIPT_AGENT]),
)
