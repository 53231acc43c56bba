"""What did a program answer? The file that it was given to write to; else what it printed.

written to $LIGHTNINGRL_OUTPUT      that file: parsed if it is JSON, else its text
printed JSON                        that, parsed
printed logs, then `{…}` or `[…]`   the last line, parsed
printed anything else               all of it, as text
"""

from pathlib import Path
from typing import Any

import msgspec

from lightningrl.errors import AgentError
from lightningrl.runner.wire import MAX_OUTPUT

OUTPUT = "LIGHTNINGRL_OUTPUT"
"""The environment variable of a program that names the file."""


def answer_of(printed: bytes, file: Path) -> Any:
    """Raises `AgentError` for one that is too long."""
    if len(printed) > MAX_OUTPUT:
        raise AgentError(
            f"the agent printed more than `{MAX_OUTPUT}` bytes",
            hint=f"log to stderr; the answer may go to the file `{OUTPUT}`",
        )
    if file.exists() and file.stat().st_size:
        with file.open("rb") as stream:
            written = stream.read(MAX_OUTPUT + 1)
        if len(written) > MAX_OUTPUT:
            raise AgentError(
                f"the agent wrote more than `{MAX_OUTPUT}` bytes to `{OUTPUT}`",
                hint="write it elsewhere and return its path",
            )
        return _parsed(written)
    last = printed.rstrip().rpartition(b"\n")[2].strip()
    return _parsed(last if last[:1] in (b"{", b"[") and _is_json(last) and not _is_json(printed) else printed)


def _parsed(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text.decode(errors="replace").strip()


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True
