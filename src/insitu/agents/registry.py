"""Built-in recipes by their name in `harness.agent`.

`python -m insitu.agents.registry NAME...` installs agents into the cache and prints their folders.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from insitu.agents import claude_code, codex, gemini_cli, mini_swe, opencode, qwen_code
from insitu.agents.install import install
from insitu.agents.recipe import Recipe
from insitu.errors import SetupError

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        claude_code.RECIPE,
        codex.RECIPE,
        opencode.RECIPE,
        qwen_code.RECIPE,
        gemini_cli.RECIPE,
        mini_swe.RECIPE,
    )
}


def main(names: list[str]) -> int:
    if not names or set(names) - set(RECIPES):
        print(f"usage: python -m insitu.agents.registry NAME...; known: {' '.join(RECIPES)}", file=sys.stderr)
        return 2
    for name in names:
        try:
            installed = install(RECIPES[name].package)
        except SetupError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{name} {installed.package.version}: {installed.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
