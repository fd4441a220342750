"""Shows which kernels are compiled. After an installation that takes a minute or two; later they come from a cache."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from numba.core import event

KINDS = ("numba:compile", "freehold:compile")
SHOWN_S = 0.5  # shorter compilations are not worth a line; what comes from the cache takes less


class CompileProgress(event.Listener):
    """While entered: a line on stderr for each kernel that was compiled."""

    def __init__(self) -> None:
        self._started: list[float] = []  # of the compilations under way: one may need another
        self._is_announced = False
        self._announcement = threading.Timer(SHOWN_S, self._announce)

    def __enter__(self) -> CompileProgress:
        for one in KINDS:
            event.register(one, self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in KINDS:
            event.unregister(one, self)
        self._announcement.cancel()

    def on_start(self, event: Any) -> None:
        self._started.append(time.monotonic())
        if len(self._started) == 1 and not self._is_announced:
            self._announcement = threading.Timer(SHOWN_S, self._announce)
            self._announcement.daemon = True
            self._announcement.start()

    def on_end(self, event: Any) -> None:
        seconds = time.monotonic() - self._started.pop()
        if self._started:
            return
        self._announcement.cancel()
        if seconds >= SHOWN_S:
            data = event.data
            name = data["name"] if "name" in data else data["dispatcher"].py_func.__name__
            self._say(f"compiled {name.lstrip('_')} in {seconds:.0f} s")

    def _announce(self) -> None:
        self._is_announced = True
        self._say("compiling kernels for this machine, once; it takes a minute or two")

    def _say(self, text: str) -> None:
        print(f"freehold: {text}", file=sys.stderr, flush=True)
