"""breakeven: find the load at which speculative decoding stops paying.

The public API; what is not in `__all__` may change without notice. Names load when they are first used, so that
`import breakeven` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from breakeven.benchmark import bench, summarize_run
    from breakeven.errors import BreakevenError, EngineError, PromptsError, RunError, TargetError, UsageError
    from breakeven.measure.level import LevelSummary
    from breakeven.measure.summary import Summary, summarize
    from breakeven.options import BenchOptions
    from breakeven.records import LevelRecord, Manifest, RequestRecord
    from breakeven.runs import Run, read_run

__version__ = "0.1.0"

__all__ = [
    "BenchOptions",
    "BreakevenError",
    "EngineError",
    "LevelRecord",
    "LevelSummary",
    "Manifest",
    "PromptsError",
    "RequestRecord",
    "Run",
    "RunError",
    "Summary",
    "TargetError",
    "UsageError",
    "bench",
    "read_run",
    "summarize",
    "summarize_run",
]

_HOMES = {
    "benchmark": ("bench", "summarize_run"),
    "errors": ("BreakevenError", "EngineError", "PromptsError", "RunError", "TargetError", "UsageError"),
    "measure.level": ("LevelSummary",),
    "measure.summary": ("Summary", "summarize"),
    "options": ("BenchOptions",),
    "records": ("LevelRecord", "Manifest", "RequestRecord"),
    "runs": ("Run", "read_run"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"breakeven.{module}"), name)
    raise AttributeError(f"module 'breakeven' has no attribute {name!r}")
