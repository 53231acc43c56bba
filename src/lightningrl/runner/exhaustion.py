"""Detects that a worker is running out of files, memory or threads, which all of its attempts need."""

import errno
import os
import resource
from contextlib import suppress

FILES = 0.8
"""Share of the limit on open files. A worker with more is replaced before other attempts suffer."""
FOLDERS = ("/proc/self/fd", "/dev/fd")
"""Folders that list the open files, on Linux and on other systems."""


def is_exhaustion(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that files, memory or threads are used up."""
    seen: set[int] = set()
    found = [error]
    for one in found:  # the list grows during the loop
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, MemoryError) or (
            isinstance(one, OSError) and one.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
        ):
            return True
        if isinstance(one, RuntimeError) and str(one) == "can't start new thread":
            return True
        found += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
    return False


def files_are_short() -> bool:
    """Whether this process has nearly as many open files as it may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return False
    for folder in FOLDERS:
        with suppress(FileNotFoundError):
            try:
                return len(os.listdir(folder)) > FILES * limit
            except OSError:  # no file descriptor is left to list them
                return True
    return False
