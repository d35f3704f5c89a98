"""Every error that breakeven raises on purpose.

    BreakevenError            the root: one clear line, never a traceback on the command line
    └── UsageError            something the user gave can't be used; the text names it and the mend
        ├── TargetError       the server can't be reached, refuses us, or has no such model
        ├── PromptsError      prompts can't be read or hold nothing usable
        ├── RunError          a run directory can't be written or read
        └── EngineError       a server that we were asked to start doesn't start

A fault of the server *under load* is none of these: it is a record with an outcome.
"""

from __future__ import annotations

__all__ = ["BreakevenError", "EngineError", "PromptsError", "RunError", "TargetError", "UsageError"]


class BreakevenError(Exception):
    """The root of breakeven's errors; `str()` of it is one line for a person."""


class UsageError(BreakevenError):
    """The user gave something that can't be used. The command line exits with 2."""


class TargetError(UsageError):
    """The server at the given URL can't be measured: unreachable, refusing, or without the model."""


class PromptsError(UsageError):
    """The prompts can't be read, or hold nothing that can be sent."""


class RunError(UsageError):
    """A run directory can't be used: occupied, unreadable, or no run at all."""


class EngineError(UsageError):
    """An engine that breakeven was asked to start did not start; the text carries the end of its log."""
