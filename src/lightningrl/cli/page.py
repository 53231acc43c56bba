"""The page of a run while it trains. It costs nothing before somebody opens it: the run only listens on a socket.

At the first connection the run starts `lightningrl ui`, which serves that socket. It ends when nobody looks any more,
or with the run, and the next connection starts another one. Whatever happens to it, the run goes on.
"""

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from lightningrl import keeper
from lightningrl.cli.console import say
from lightningrl.cpu import count_as_rest
from lightningrl.errors import UserError
from lightningrl.ui.door import address, take

LOG = "ui.log"
QUICK_S = 5.0
"""A page that ends sooner has failed."""
PAUSE_S, LONGEST_S = 1.0, 60.0
"""Seconds before a page that has failed is started again: twice as many after each failure, up to the longest."""


@asynccontextmanager
async def offered(folder: Path, console: Console) -> AsyncIterator[None]:
    """Print the address of the run's page, and serve it to whoever opens it, while the block runs."""
    try:
        sock = take()
    except UserError as error:
        say(console, f"no page: {error.message}")
        yield
        return
    with sock:
        say(console, ("page: ", "bold"), f"{address(sock)}#/run/{quote(folder.resolve().name, safe='')}")
        serving = asyncio.create_task(_serve(sock, folder))
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait([serving])


async def _serve(sock: socket.socket, folder: Path) -> None:
    pause_s = PAUSE_S
    while True:
        await _knocked(sock)
        began = time.monotonic()
        with suppress(OSError):  # no memory, no processes or no disk left: the run has other worries
            await _run(sock, folder)
        if time.monotonic() - began < QUICK_S:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
        else:
            pause_s = PAUSE_S


async def _knocked(sock: socket.socket) -> None:
    """Wait for a connection, and leave it to the page."""
    loop = asyncio.get_running_loop()
    knocked = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: knocked.done() or knocked.set_result(None))
    try:
        await knocked
    finally:
        loop.remove_reader(sock.fileno())


async def _run(sock: socket.socket, folder: Path) -> None:
    """Run the page until it ends. Its keeper kills it if this process ends first, even by `kill -9`."""
    ours, theirs = socket.socketpair()
    with ours, theirs, (folder / LOG).open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno())),
            *(sys.executable, "-P", "-m", "lightningrl", "ui", "--fd", str(sock.fileno()), str(folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=log,
            pass_fds=[theirs.fileno(), sock.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
        theirs.close()
        count_as_rest(process.pid)
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()  # the keeper kills it at once
                await process.wait()
