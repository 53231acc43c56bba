"""`lightningrl ui [RUN…]`: serve the page of some runs until Ctrl-C."""

import asyncio
import math
import os
import secrets
import socket
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from lightningrl.cli.console import say
from lightningrl.cli.folder import RUNS
from lightningrl.cli.stop import Interrupted, run
from lightningrl.errors import UserError
from lightningrl.gateway.identity import is_loopback
from lightningrl.look.runs import is_run
from lightningrl.ui.door import address, take
from lightningrl.ui.export import exported
from lightningrl.ui.server import serving

NICE = 10
"""Priority of such a page: it computes while the run leaves a core free, and seldom otherwise."""
IDLE_S = 60.0
"""A page that a run has started ends after so long without a viewer. The next viewer starts it again."""


def serve(paths: Sequence[Path], *, host: str, port: int | None, browser: bool, console: Console) -> None:
    """Serve until a signal arrives. `paths`: folders of runs, or folders with runs in them; none: `runs/`."""
    places = known(paths)
    key = None if is_loopback(host) else secrets.token_urlsafe(24)
    with take(host, port) as sock:
        url = address(sock, key=key)
        say(console, ("page: ", "bold"), url)
        say(console, "Ctrl-C ends it", *([] if key is None else [". Whoever has this address can read these runs"]))
        with suppress(Interrupted):
            run(_serve(places, sock, key=key, host=host, opens=url if browser else None))


def export(paths: Sequence[Path], to: Path, *, console: Console) -> None:
    """Write the page of one run into a file."""
    if len(paths) != 1 or not is_run(paths[0]):
        raise UserError(
            "`--export` writes one run", hint="give the folder of one run: `lightningrl ui RUN --export run.html`"
        )
    page = run(exported(paths[0]))
    try:
        to.write_bytes(page)
    except OSError as error:
        raise UserError(f"cannot write `{to}`: {error.strerror}", hint="give a path that can be written") from error
    say(console, f"wrote {to} ({len(page) / 1e6:.1f} MB): it opens in any browser, without a server")


def serve_given(paths: Sequence[Path], descriptor: int) -> None:
    """Serve on a socket of the run that has started this process, until nobody looks any more. The run comes first."""
    os.nice(NICE)
    with socket.socket(fileno=descriptor) as sock, suppress(Interrupted):
        run(_serve(paths, sock, idle_s=IDLE_S))


def known(paths: Sequence[Path]) -> Sequence[Path]:
    """The paths. Raises `UserError` if there is no run at one of them."""
    for path in paths or [RUNS]:
        folder = path if path.is_dir() else path.parent
        if not path.exists() or not (is_run(folder) or any(map(is_run, folder.glob("*")))):
            hint = "give the folder of a run, or start one: `lightningrl demo`"
            raise UserError(f"there is no run at `{path}`", hint=hint)
    return paths or [RUNS]


async def _serve(
    paths: Sequence[Path],
    sock: socket.socket,
    *,
    key: str | None = None,
    host: str = "",
    opens: str | None = None,
    idle_s: float = math.inf,
) -> None:
    async with serving(paths, sock, key=key, host=host) as visits:
        if opens is not None:
            await asyncio.to_thread(webbrowser.open, opens)
        await visits.ended(idle_s)
