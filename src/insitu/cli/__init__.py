"""Command line of insitu.

Known failures are one line on stderr beginning with `insitu:`. Exit codes: 0 done, 1 failed, 2 wrong command
line or configuration, 130 stopped by Ctrl-C, SIGTERM or SIGHUP (resumable). INSITU_DEBUG=1 adds tracebacks.
"""

from __future__ import annotations

# Commands import what they need when they run, so that `--help` is fast; this module imports almost nothing,
# so that the signal handlers are installed early.
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    signals = _Signals()
    try:
        return _main(argv, signals)
    except BaseException as error:
        # After a signal, for example during an import, other errors are consequences of it.
        if not signals.received or isinstance(error, SystemExit):
            raise
        sys.stderr.write("insitu: stopped\n")
        return 130
    finally:
        signals.restore()


def _main(argv: Sequence[str] | None, signals: _Signals) -> int:
    from insitu.cli.options import parse
    from insitu.cli.report import EXIT_FAILED, escape_unencodable_output, how_to_resume, report_failure
    from insitu.errors import InsituError

    escape_unencodable_output()
    try:
        command, options = parse(argv)
        code = command(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe, as in `insitu show RUN | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (KeyboardInterrupt, InsituError, OSError, BaseExceptionGroup) as error:
        return report_failure(KeyboardInterrupt() if signals.received else error, how_to_resume(error))
    return code


class _Signals:
    """Handlers that turn SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt.

    Ignored signals stay ignored, for example SIGHUP under nohup. `shutdown.run_interruptible` installs its
    own handlers.
    """

    def __init__(self) -> None:
        self.received = False
        self._before = dict(self._install())

    def _install(self) -> Iterator[tuple[int, object]]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler):
                try:
                    signal.signal(number, self._interrupt)
                except ValueError:  # not the main thread
                    return
                yield number, before

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt

    def restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
