"""breakeven: find the load at which speculative decoding stops paying.

The public API; what is not in `__all__` may change without notice. Names load when they are first used, so that
`import breakeven` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from breakeven.benchmark import Bench, bench, resume, summarize_run
    from breakeven.decide.comparison import Comparison
    from breakeven.decide.verify import Verification
    from breakeven.errors import BreakevenError, EngineError, PromptsError, RunError, TargetError, UsageError
    from breakeven.measure.level import LevelSummary
    from breakeven.measure.summary import Summary, summarize
    from breakeven.options import BenchOptions, CompareOptions
    from breakeven.records import LevelRecord, Manifest, RequestRecord
    from breakeven.runs import Run, read_run
    from breakeven.verifying import measure_and_verify, verify_directories
    from breakeven.versus import compare_directories, measure_and_compare

__version__ = "0.1.0"

__all__ = [
    "Bench",
    "BenchOptions",
    "BreakevenError",
    "CompareOptions",
    "Comparison",
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
    "Verification",
    "bench",
    "compare_directories",
    "measure_and_compare",
    "measure_and_verify",
    "read_run",
    "resume",
    "summarize",
    "summarize_run",
    "verify_directories",
]

_HOMES = {
    "benchmark": ("Bench", "bench", "resume", "summarize_run"),
    "decide.comparison": ("Comparison",),
    "decide.verify": ("Verification",),
    "errors": ("BreakevenError", "EngineError", "PromptsError", "RunError", "TargetError", "UsageError"),
    "measure.level": ("LevelSummary",),
    "measure.summary": ("Summary", "summarize"),
    "options": ("BenchOptions", "CompareOptions"),
    "records": ("LevelRecord", "Manifest", "RequestRecord"),
    "runs": ("Run", "read_run"),
    "verifying": ("measure_and_verify", "verify_directories"),
    "versus": ("compare_directories", "measure_and_compare"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"breakeven.{module}"), name)
    raise AttributeError(f"module 'breakeven' has no attribute {name!r}")
