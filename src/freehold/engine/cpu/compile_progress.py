"""Shows kernel compilation. It makes the first start slow; later starts load kernels from a cache."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from numba.core import event

KINDS = ("numba:compile", "freehold:compile")
SHOWN_S = 0.5  # shorter compilations are not reported; loading from the cache takes less


class CompileProgress(event.Listener):
    """Prints a line on stderr for each compiled kernel, from `begin` until the context exits. `sums_up`: also print a
    first and a last line."""

    def __init__(self, sums_up: bool = True) -> None:
        self._sums_up, self._is_listening = sums_up, False
        self._started: list[float] = []  # of the compilations in progress, which may be nested
        self._announced: float | None = None
        self._announcement = threading.Timer(SHOWN_S, self._announce)

    def begin(self) -> None:
        if self._is_listening:
            return
        self._is_listening = True
        for one in KINDS:
            event.register(one, self)

    def __enter__(self) -> CompileProgress:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in KINDS:
            event.unregister(one, self)
        self._is_listening = False
        self._announcement.cancel()
        if self._announced is not None and self._sums_up and error is None:
            seconds = time.monotonic() - self._announced + SHOWN_S
            self._say(f"all kernels are there after {seconds:.0f} s; the next start finds them")
        self._announced = None

    def on_start(self, event: Any) -> None:
        self._started.append(time.monotonic())
        if len(self._started) == 1 and self._announced is None:
            self._announcement = threading.Timer(SHOWN_S, self._announce)
            self._announcement.daemon = True
            self._announcement.start()

    def on_end(self, event: Any) -> None:
        if not self._started:  # it began before this listener
            return
        seconds = time.monotonic() - self._started.pop()
        if self._started:
            return
        self._announcement.cancel()
        if seconds >= SHOWN_S:
            data = event.data
            name = data["name"] if "name" in data else data["dispatcher"].py_func.__name__
            self._say(f"compiled {name.lstrip('_')} in {seconds:.0f} s")

    def _announce(self) -> None:
        self._announced = time.monotonic()
        if self._sums_up:
            self._say("compiling kernels for this machine, once; each that takes a while is named when it is done")

    def _say(self, text: str) -> None:
        print(f"freehold: {text}", file=sys.stderr, flush=True)
