"""A wall clock that jumps, for the processes that are started with it. Monotonic clocks can't jump, and do not."""

import mmap
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *ahead;  /* seconds */

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_JUMPS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) ahead = found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *result) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (result) *result = exact.tv_sec;
    return exact.tv_sec;
}
"""


class JumpingClock:
    """`environment`: what a process is started with, so that it reads this clock."""

    def __init__(self, folder: Path):
        source, library, jumps = folder / "clock.c", folder / "clock.so", folder / "jumps"
        source.write_text(SOURCE)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        jumps.write_bytes(bytes(8))
        with jumps.open("r+b") as file:
            self._ahead = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_JUMPS": str(jumps)}

    @property
    def ahead(self) -> int:
        """Seconds, of the right time."""
        return struct.unpack("q", self._ahead[:])[0]

    def jump(self, seconds: int) -> None:
        self._ahead[:] = struct.pack("q", self.ahead + seconds)
