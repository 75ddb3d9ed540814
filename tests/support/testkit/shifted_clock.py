"""A wall clock that jumps for the processes of one state folder, and for nothing else.

A preloaded library adds an offset to CLOCK_REALTIME; the offset is a number in a file that every
process maps, so a jump is one write and reaches all of them at once. CLOCK_MONOTONIC stays, as it
does when a machine's clock is set. The product hands no LD_PRELOAD on to its services: run as a
program, this module lets it, around the command line.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

VARIABLES = ("LD_PRELOAD", "MEMSWEEP_TEST_CLOCK")
COMPILER = shutil.which("cc")

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const long long *offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *name = getenv("MEMSWEEP_TEST_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *place = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (place != MAP_FAILED) offset = place;
    close(file);
}

static long long ahead(void) { return offset ? *offset : 0; }

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    if (code == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    int code = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return code;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}

/* Its deadline is on the real clock, which does not jump. */
int sem_timedwait(sem_t *restrict lock, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec there = *until;
    there.tv_sec -= ahead();
    return real(lock, &there);
}
"""


@dataclass(frozen=True, slots=True)
class ShiftedClock:
    """The library and the file of the offset, in one folder."""

    library: Path
    file: Path

    @classmethod
    def make(cls, folder: Path) -> ShiftedClock:
        """Compile the library; the offset is 0."""
        assert COMPILER is not None, "no C compiler: apt-get install gcc libc6-dev"
        source, library = folder / "clock.c", folder / "clock.so"
        source.write_text(SOURCE)
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"],
            check=True,
        )
        clock = cls(library, folder / "offset")
        clock.file.write_bytes(struct.pack("q", 0))
        return clock

    def jump_to(self, seconds: int) -> None:
        """Let the clock of every process be so many seconds ahead of the machine's."""
        with self.file.open("r+b") as file:  # in place: the file is mapped
            file.write(struct.pack("q", seconds))

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs to have this clock."""
        return dict(zip(VARIABLES, (str(self.library), str(self.file)), strict=True))


def hand_on(inherited: Callable[[], dict[str, str]]) -> Callable[[], dict[str, str]]:
    """Return ``settings.inherited`` with the clock's variables added."""

    def more() -> dict[str, str]:
        return inherited() | {name: os.environ[name] for name in VARIABLES}

    return more


if __name__ == "__main__":
    from tasks.launch import settings

    settings.inherited = hand_on(settings.inherited)
    from flows.cli import main

    main(sys.argv[1:])
