"""The verbs: demo, train, sft, rollout, serve, recover, replay, grade, bench, show, tasks, conformance,
attack, doctor.

Every failure a person can meet is one line on stderr beginning `whet:`. Exit codes: 0 done, 1 failed,
2 wrong command line or configuration, 130 stopped by Ctrl-C (resumable). Each verb imports what it needs at
its own start, so that `--help` loads neither torch nor the gateway. WHET_DEBUG=1 adds tracebacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from whet.cli.options import parse
from whet.cli.report import EXIT_FAILED, how_to_resume, process_began, report_failure
from whet.errors import WhetError

__all__ = ["main", "process_began"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parse(argv)
    try:
        code: int = options.verb(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone, as in `whet show RUN | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (KeyboardInterrupt, WhetError, OSError, BaseExceptionGroup) as error:
        return report_failure(error, how_to_resume(options))
    return code
