"""The workers of a run on other machines: how to start one, and who is connected, on the screen of the run."""

import asyncio
from collections import Counter

from rich.console import Console

from lightningrl.cli.console import say
from lightningrl.cli.listen import KEY_PLACE, worker_command
from lightningrl.cli.live import Progress
from lightningrl.gateway.identity import is_loopback
from lightningrl.gateway.roster import Connected
from lightningrl.gateway.workers import KEY_FILE
from lightningrl.serve import LightningServer

LOOK_S = 0.5
"""Seconds between two looks at who is connected."""


def invite(server: LightningServer, console: Console) -> None:
    """Say how to start a worker elsewhere, if the run listens for workers."""
    if not expects_workers(server):
        return
    key = server.folder / KEY_FILE
    say(console, f"to run agents on another machine, copy `{key}` there as `{KEY_PLACE}`,")
    say(console, "copy the recipe's folder, and type in it:")
    say(console, f"  {_command(server)}")
    if is_loopback(server.config.gateway.host) and not server.config.gateway.public_url:
        say(console, "only this machine reaches that address; for other machines, add `--listen 0.0.0.0:8100`")


def expects_workers(server: LightningServer) -> bool:
    """Whether workers are meant to connect: the port is a known one, or no agents run here."""
    return bool(server.config.gateway.port) or _needs_workers(server)


def _needs_workers(server: LightningServer) -> bool:
    """The processes of this machine have no labels."""
    agent = server.config.agent
    return not agent.workers or bool(agent.labels)


async def follow(server: LightningServer, progress: Progress) -> None:
    """Show who is connected, until cancelled."""
    while True:
        present = server.workers.roster.present()
        headline = _headline(server, present)
        names = [worker.hello.worker for worker in present]
        progress.workers(headline, names, urgent=headline.startswith("waiting"))
        await asyncio.sleep(LOOK_S)


def _headline(server: LightningServer, present: list[Connected]) -> str:
    """`3 workers, 41 running (2 gpu-browser)`; empty if there is nothing to say."""
    wanted = set(server.config.agent.labels)
    if any(wanted <= set(worker.hello.labels) for worker in present):
        count, running = len(present), sum(worker.running for worker in present)
        labels = Counter(label for worker in present for label in worker.hello.labels)
        labelled = ", ".join(f"{number} {label}" for label, number in labels.most_common(4))
        said = f"{count} worker{'' if count == 1 else 's'}, {running} running"
        return f"{said} ({labelled})" if labelled else said
    if not _needs_workers(server):
        return ""
    return f"waiting for workers with the labels {', '.join(sorted(wanted))}" if wanted else "waiting for workers"


def _command(server: LightningServer) -> str:
    return worker_command(server.config, port=server.port)
