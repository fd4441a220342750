"""The machine on which figures are measured."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from freehold.engine.cpu.isa import available


def machine() -> str:
    """Return the processor, its cores and its instruction sets."""
    return f"{_processor()}, {os.cpu_count()} cores, {', '.join(available())}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
