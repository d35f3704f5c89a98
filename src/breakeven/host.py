"""What this machine is, for the manifest, and how to read what a machine says of itself."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httptools
import msgspec
import numpy
import uvloop

__all__ = ["GPU_QUERY", "core_count", "cpu_model", "cuda_version", "describe_host", "describe_machine", "gpu_lines"]

GPU_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
"""What `nvidia-smi` is asked; `gpu_lines` reads the answer."""

NVIDIA_SMI_LIMIT_S = 20  # without its persistence daemon the driver first initialises each GPU, for seconds


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_host() -> dict[str, Any]:
    """This machine, Python and the libraries that measuring rests on."""
    return describe_machine() | {
        "python": platform.python_version(),
        "libraries": {library.__name__: library.__version__ for library in (httptools, msgspec, numpy, uvloop)},
    }


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, system; the GPUs with their driver, and CUDA, where `nvidia-smi` is there."""
    return {
        "cpu": _cpu_model(),
        "cores": core_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "gpus": gpu_lines(_nvidia_smi(*GPU_QUERY)),
        "cuda": cuda_version(_nvidia_smi()),
    }


def cpu_model(cpuinfo: str) -> str | None:
    """The processor's name in the text of /proc/cpuinfo; None where it has none, as on Arm."""
    found = re.search(r"^model name\s*:\s*(.*\S)", cpuinfo, re.MULTILINE)
    return found[1] if found else None


def gpu_lines(answer: str) -> list[str]:
    """A line for each GPU, "name, memory, driver", from the answer to GPU_QUERY."""
    return [line.strip() for line in answer.splitlines() if line.strip()]


def cuda_version(header: str) -> str | None:
    """The newest CUDA that the driver supports, from what `nvidia-smi` prints without arguments.

    It is in no query. Drivers since 610 call it "CUDA UMD Version"; where libcuda can't be loaded it is N/A.
    """
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d[\d.]*)", header)
    return found[1] if found else None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text("utf-8", "replace") if sys.platform == "linux" else ""
    return cpu_model(cpuinfo) or platform.processor() or platform.machine()


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        answer = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout
