"""Terminus-style agent: the model sees a terminal and types into it.

The agent loop is insitu's own package `terminus_agent`, which runs on the sandbox's Python.
"""

from __future__ import annotations

from pathlib import Path

from insitu.agents.recipe import Recipe, read_files

LOOP = Path(__file__).with_name("terminus_agent")
START = (
    "import runpy, sys; sys.path.insert(0, '{files}'); "
    "runpy.run_module('terminus_agent', run_name='__main__')"
)

RECIPE = Recipe(
    name="terminus",
    command=("python3", "-I", "-S", "-c", START),
    files=read_files([LOOP]),
    env={"CONTEXT_TOKENS": "{context_tokens}", "CALL_TOKENS": "{call_tokens}"},
)
