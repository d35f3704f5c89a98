"""The line that says how far a run is: rewritten in place on a terminal, a plain line now and then elsewhere.

Written by hand, not with a display library: it is drawn in the event loop that stamps chunks, where a render of some
milliseconds would be seen in the measurement.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TextIO

__all__ = ["Live"]

#: How often a plain line comes where nothing can be rewritten.
_PLAIN_EVERY_S = 10.0


class Live:
    """Progress on a stream, usually stderr. `quiet` writes nothing but what `say` is given."""

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        self._stream, self._quiet = stream, quiet
        self._is_terminal = stream.isatty()
        self._said_at = time.monotonic()
        self._drawn = False

    def update(self, text: str) -> None:
        """Shows the state of things now."""
        if self._quiet:
            return
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns
            self._write(f"\r{text[: columns - 1]}\x1b[K")  # a line that wraps can't be rewritten
            self._drawn = True
        elif time.monotonic() - self._said_at >= _PLAIN_EVERY_S:
            self.say(text)

    def say(self, text: str) -> None:
        """Writes a line that stays."""
        self.clear()
        self._write(text + "\n")
        self._said_at = time.monotonic()

    def clear(self) -> None:
        """Removes the line that is rewritten in place."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        # Whoever read it may be gone, with hours still to measure.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
