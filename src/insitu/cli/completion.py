"""Completion in bash: commands, options, their values and configuration keys.

The script calls `INSITU_COMPLETE=1 insitu WORDS`, which prints what may follow these words, one per line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from insitu.command import Arg

SCRIPTS = {
    "bash": """_insitu() {
  local IFS=$'\\n'
  COMPREPLY=($(compgen -W "$(INSITU_COMPLETE=1 insitu "${COMP_WORDS[@]:1:COMP_CWORD-1}")" -- "$2"))
}
complete -o default -F _insitu insitu
""",
}


def candidates(words: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> Iterable[str]:
    """Return what may follow `words`; the shell filters by what is typed."""
    parser = commands.get(words[0]) if words else None
    if parser is None:
        return commands
    options = parser._option_string_actions
    if words[-1] in options and options[words[-1]].nargs != 0:
        return map(str, options[words[-1]].choices or ())
    found = [option for option in options if option.startswith("--")]
    for action in parser._get_positional_actions():
        if action.choices and len(words) == 1:
            return map(str, action.choices)
        if action.dest == "overrides":
            from insitu.config.load import dotted_keys

            found += [f"{key}=" for key in dotted_keys()]
    return found


def completion(
    shell: Annotated[
        str, Arg(positional=True, choices=tuple(SCRIPTS), help='bash: eval "$(insitu completion bash)"')
    ],
) -> int:
    print(SCRIPTS[shell], end="")
    return 0
