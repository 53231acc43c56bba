"""Is a worker running out of something that all of its attempts need: files, memory, threads?"""

import errno
import os
import resource
from contextlib import suppress

FILES = 0.8
"""Share of the files that a process may have open. A worker that has more is replaced before it hurts anybody."""
FOLDERS = ("/proc/self/fd", "/dev/fd")
"""What lists the open files, on Linux and elsewhere."""


def is_exhaustion(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that files, memory or threads are used up."""
    seen: set[int] = set()
    found = [error]
    for one in found:  # it grows meanwhile
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
    """Whether most of the files that this process may have open are open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return False
    for folder in FOLDERS:
        with suppress(FileNotFoundError):
            try:
                return len(os.listdir(folder)) > FILES * limit
            except OSError:  # not one is left to look with
                return True
    return False
