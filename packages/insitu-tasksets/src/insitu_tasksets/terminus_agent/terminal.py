"""Shell at a pseudo-terminal, with a VT100 screen emulator."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

ROWS, COLUMNS = 40, 160
SHOWN_CHARS = 10_000
QUIET_S, FIRST_S = 0.05, 1.0
START_S = 30.0
"""Timeout of the shell's first prompt."""
PROMPT, RUNNING = "\x1b]133;B\x07", "\x1b]133;C\x07"
"""Invisible markers that the shell writes after each prompt and before it runs a command. Being the
foreground process group alone does not mean that the shell waits for input."""
KEYS = {"Enter": "\r", "Tab": "\t", "Escape": "\x1b", "BSpace": "\x7f", "Space": " "}
ENDS_LINE = "\r\n\x03\x04"
KEYS |= {"Up": "\x1b[A", "Down": "\x1b[B", "Right": "\x1b[C", "Left": "\x1b[D"}


class Screen:
    """Screen emulator with the subset of VT100 that shells, pagers and editors need."""

    ESCAPE = re.compile(
        r"\x1b(?:\[([?>=]?)([\d;]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>78DEHMNOcZ])"
    )

    def __init__(self) -> None:
        self.lines = [""]
        self.row = self.column = 0
        self.top = 0
        """First visible line; lines above have scrolled off."""
        self.seen = 0
        """First line that was not returned by `news` yet."""
        self.redrawn = False
        self.prompts = 0
        """Prompts written so far."""
        self.at_prompt = False
        """A prompt was written and no command was started since."""
        self._rest = ""

    def feed(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = self.ESCAPE.match(text, at)
                if found is None and len(text) - at < 64:  # incomplete until the next read
                    self._rest = text[at:]
                    return
                if found is not None and found[3]:
                    self._control(found[1], found[2], found[3])
                elif found is not None and found[0] in (PROMPT, RUNNING):
                    self.at_prompt = found[0] == PROMPT
                    self.prompts += self.at_prompt
                at = found.end() if found else at + 1
            else:
                self._put(text[at])
                at += 1

    def _put(self, char: str) -> None:
        if char == "\n":
            self._to(self.row + 1, self.column)
        elif char == "\r":
            self.column = 0
        elif char == "\b":
            self.column = max(0, self.column - 1)
        elif char == "\t":
            self.column = min(COLUMNS - 1, self.column // 8 * 8 + 8)
        elif char >= " " and char != "\x7f":
            if self.column >= COLUMNS:
                self._to(self.row + 1, 0)
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
            self.column += 1

    def _to(self, row: int, column: int) -> None:
        self.row, self.column = max(self.top, row), max(0, min(COLUMNS - 1, column))
        self.lines += [""] * (self.row + 1 - len(self.lines))
        self.top = max(self.top, self.row + 1 - ROWS)

    def _control(self, private: str, numbers: str, kind: str) -> None:
        values = [int(part) for part in numbers.split(";") if part]
        first = values[0] if values else 0
        if private:
            if first in (47, 1047, 1049):
                self._clear()
        elif kind in "ABCD":
            step = max(1, first)
            down, right = {"A": (-step, 0), "B": (step, 0), "C": (0, step), "D": (0, -step)}[kind]
            self._to(min(self.row + down, self.top + ROWS - 1), self.column + right)
        elif kind in "Hf":
            self.redrawn = True
            self._to(self.top + min(ROWS, max(1, first)) - 1, (values[1] if len(values) > 1 else 1) - 1)
        elif kind == "G":
            self._to(self.row, max(1, first) - 1)
        elif kind == "K":
            line = self.lines[self.row]
            kept = {0: line[: self.column], 1: " " * self.column + line[self.column :], 2: ""}
            self.lines[self.row] = kept.get(first, line)
        elif kind == "J" and first in (2, 3):
            self._clear()
        elif kind == "J" and not first:
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]

    def _clear(self) -> None:
        """Start a new screen; old lines count as scrolled off."""
        self.redrawn = True
        self.top = self.row = len(self.lines)
        self.lines.append("")
        self.column = 0

    def shown(self) -> str:
        return _cut("\n".join(line.rstrip() for line in self.lines[self.top :]).rstrip())

    def news(self) -> str:
        """Return the output since the last call; the whole screen when it was redrawn."""
        redrawn, start = self.redrawn, min(self.seen, len(self.lines) - 1)
        self.redrawn, self.seen = False, self.row
        if redrawn:
            return self.shown()
        return _cut("\n".join(line.rstrip() for line in self.lines[start:]).rstrip())


def _cut(text: str) -> str:
    if len(text) <= SHOWN_CHARS:
        return text
    half = SHOWN_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


class Terminal:
    """A shell at a pseudo-terminal."""

    def __init__(self) -> None:
        self.screen = Screen()
        self._shell, self._fd = pty.fork()
        if self._shell == 0:
            mark = rf"\[{PROMPT}\]"
            os.environ |= {"PS1": rf"\w\$ {mark}", "PS2": f"> {mark}", "PS0": RUNNING}
            os.environ |= {"TERM": "vt100", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
            os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._awaited = 1
        """Number of prompts after which all typed commands have finished."""
        self._read(START_S)

    def type(self, keys: str, wait_s: float) -> None:
        named = KEYS.get(keys) or (
            chr(ord(keys[2].upper()) & 31) if re.fullmatch("C-[a-zA-Z]", keys) else keys
        )
        self._awaited = self.screen.prompts + sum(named.count(key) for key in ENDS_LINE)
        data = named.encode("utf-8", "replace")
        while data:
            _, ready, _ = select.select([], [self._fd], [], 1.0)
            if not ready:
                break
            data = data[os.write(self._fd, data[:1024]) :]
            self._read(0.0)
        self._read(wait_s)

    def _read(self, wait_s: float) -> None:
        """Read output for `wait_s`, or until the shell is idle."""
        ends, pending = time.monotonic() + wait_s, b""
        while True:
            left = ends - time.monotonic()
            ready, _, _ = select.select([self._fd], [], [], max(0.0, min(QUIET_S, left)))
            try:
                if ready and not (chunk := os.read(self._fd, 65536)):
                    return
            except OSError:  # the shell has ended
                return
            if ready:
                pending += chunk
                text, pending = _decode(pending)
                self.screen.feed(text)
            elif left <= 0 or self._idle():
                return

    def _idle(self) -> bool:
        if not self.screen.at_prompt or self.screen.prompts < self._awaited:
            return False
        try:
            return os.tcgetpgrp(self._fd) == self._shell
        except OSError:
            return True

    def close(self) -> None:
        os.killpg(self._shell, signal.SIGHUP)


def _decode(data: bytes) -> tuple[str, bytes]:
    """Return the decoded text and the bytes of an incomplete last character."""
    for kept in range(min(4, len(data) + 1)):
        try:
            return data[: len(data) - kept].decode(), data[len(data) - kept :]
        except UnicodeDecodeError:
            continue
    return data.decode("utf-8", "replace"), b""
