"""A sandbox for each attempt of a program, made by bubblewrap: `agent.isolation = "bwrap"`.

The program sees the system's programs, Python, and the recipe's folder, all read-only, and an empty /tmp and an empty
home of its own. It has its own process ids and its own empty network. Its model is where it was: `cell.py` listens
there, inside, and `door.py` accepts those connections outside and takes them to the gateway.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from lightningrl.config import AgentConfig
from lightningrl.errors import UserError
from lightningrl.runner import cell
from lightningrl.runner.door import door

BWRAP = "bwrap"
HOME = "/home/agent"
KEY_FILE = "worker.key"
"""A copy of the worker key beside the recipe, which the program cannot read."""
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store"),
    *("/etc/alternatives", "/etc/fonts", "/etc/group", "/etc/host.conf", "/etc/hosts", "/etc/ld.so.cache"),
    *("/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/mime.types", "/etc/nsswitch.conf", "/etc/passwd"),
    *("/etc/pki/tls/certs", "/etc/protocols", "/etc/services", "/etc/ssl/certs", "/etc/ssl/openssl.cnf"),
)
"""What a program can read, where it exists. No /run and no /var: their sockets lead out of the sandbox."""
GONE = ("TMPDIR", "TMP", "TEMP", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "XAUTHORITY", "DISPLAY", "WAYLAND_DISPLAY")
"""Environment variables with places that are not in the sandbox; besides those that begin with `XDG_`."""
CHECK_S = 10.0
GIB = 2**30


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox of an attempt."""

    processes: int
    """Processes that may exist at once."""
    memory: int
    """Bytes for each process, and for all together."""
    file: int
    """Bytes of a file, and of all files in /tmp, in the home, and in shared memory, each."""
    readable: tuple[str, ...]
    """More paths that the program can read."""
    hidden: tuple[str, ...]
    """Folders below those that it can read, which look empty to it."""
    secret: tuple[str, ...]
    """Files below those that it can read, which it cannot open."""


def configured(agent: AgentConfig, *, root: Path, run_folder: Path | None) -> Isolation | None:
    """The sandbox that a recipe describes; None: none. `root`: the recipe's folder. It hides the folders of runs."""
    if agent.isolation == "none":
        return None
    readable = [(root / path).resolve() for path in agent.readable]
    return Isolation(
        processes=agent.processes,
        memory=round(agent.memory_gib * GIB),
        file=round(agent.file_gib * GIB),
        readable=tuple(map(str, readable)),
        hidden=tuple(str(folder.resolve()) for folder in (root / "runs", run_folder) if folder is not None),
        secret=tuple(str((folder / KEY_FILE).resolve()) for folder in (root, *readable)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How to start a program, here or in a sandbox."""

    command: Sequence[str]
    env: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    """Open files to pass on."""


def check() -> None:
    """Raises `UserError` if sandboxes cannot be made here."""
    if shutil.which(BWRAP) is None:
        hint = "`apt install bubblewrap`, or leave out `agent.isolation`"
        raise UserError("the program `bwrap` is not installed", hint=hint)
    command = [*_namespaces(), *_read_only(SYSTEM), "--proc", "/proc", "--dev", "/dev", "true"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=CHECK_S, check=False, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        raise UserError(f"`bwrap` made no sandbox within {CHECK_S:g} s") from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()
        hint = "allow user namespaces: `sysctl user.max_user_namespaces=10000`, and on Ubuntu 24.04 and later "
        hint += "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or leave out `agent.isolation`"
        raise UserError(f"`bwrap` cannot make a sandbox here: {why[-1] if why else 'it says nothing'}", hint=hint)


def visible(program: str, isolation: Isolation, *, root: Path) -> bool:
    """Whether the sandbox has a program."""
    seen = [Path(path).resolve() for path in (*SYSTEM, *_own_paths(), *isolation.readable, root)]
    return any(Path(program).resolve().is_relative_to(path) for path in seen)


@asynccontextmanager
async def sandboxed(
    command: Sequence[str], env: Mapping[str, str], isolation: Isolation, *, output: Path, gateway: str
) -> AsyncIterator[Place]:
    """Yields how to start `command` in a sandbox.

    `output`: the one file outside that it can write. `gateway`: the URL that it can reach.
    """
    url = urlsplit(gateway)
    host, port = url.hostname or "", url.port or 80
    output.touch()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        limits = [str(number) for number in (isolation.processes, isolation.memory, isolation.file)]
        place = "::1" if host == "::1" else "127.0.0.1"
        python = [os.path.realpath(sys.executable), "-I", "-S", cell.__file__]
        inner = [*python, str(theirs.fileno()), place, str(port), *limits, *command]
        paths = [*SYSTEM, *_own_paths(), *isolation.readable, os.getcwd()]
        mounts = _mounts(paths, isolation, output=output, codex=env.get("CODEX_HOME", ""))
        outer = [*_namespaces(), *mounts, "--chdir", os.getcwd(), "--"]
        async with door(ours, host=host, port=port):
            yield Place(command=[*outer, *inner], env=_environment(env), descriptors=(theirs.fileno(),))


def _namespaces() -> list[str]:
    """The command that makes a sandbox, up to its mounts."""
    names = [f"--unshare-{name}" for name in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
    return [BWRAP, *names, "--disable-userns", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]


def _mounts(paths: Sequence[str], isolation: Isolation, *, output: Path, codex: str) -> list[str]:
    """Everything that the program sees. `codex`: a folder with a config.toml, of which it gets a copy; empty: none."""
    mounts = ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp", HOME):
        mounts += ["--size", str(isolation.file), "--tmpfs", folder]
    mounts += _read_only(paths)
    seen = [Path(path) for path in paths]
    hidden = [f for f in isolation.hidden if os.path.isdir(f) and any(Path(f).is_relative_to(path) for path in seen)]
    for folder in hidden:
        mounts += ["--tmpfs", folder]
    for file in isolation.secret:
        if os.path.isfile(file) and any(Path(file).is_relative_to(path) for path in seen):
            mounts += ["--ro-bind", "/dev/null", file]
    if codex:
        config = f"{codex}/config.toml"
        mounts += ["--size", str(isolation.file), "--tmpfs", codex, "--ro-bind-try", config, config]
    mounts += ["--bind", str(output), str(output)]
    # a worker of root could otherwise change the kernel's settings in /proc/sys, even without capabilities
    return mounts + [part for folder in ("/proc", "/dev", *hidden, "/") for part in ("--remount-ro", folder)]


def _read_only(paths: Iterable[str]) -> list[str]:
    """Mounts for these paths; those below another one of them need none of their own."""
    wanted = dict.fromkeys(paths)
    own = [path for path in wanted if not any(str(parent) in wanted for parent in Path(path).parents)]
    return [part for path in own for part in ("--ro-bind-try", path, path)]


def _own_paths() -> list[str]:
    """Where this Python and its packages are: the program may be a script for it. No other folders of `sys.path`."""
    real = str(Path(sys.executable).resolve().parents[1])
    packages = [path for path in sys.path if path.endswith(("/site-packages", "/dist-packages"))]
    return [sys.prefix, sys.base_prefix, real, str(Path(cell.__file__).parents[1]), *packages]


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in env.items() if name not in GONE and not name.startswith("XDG_")}
    return {**kept, "HOME": HOME}
