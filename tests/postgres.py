"""A real PostgreSQL in a temporary folder, for tests and benchmarks. It is reached through a socket in that folder."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`, of the newest version; None if PostgreSQL is not installed."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    found = str(debian[-1]) if debian else shutil.which("initdb")
    return None if found is None else Path(found).parent


class Postgres:
    """A server of its own. PostgreSQL refuses to run as root, so root starts it as another user."""

    def __init__(self, folder: Path, *, settings: dict[str, str]) -> None:
        self._folder = folder
        self._settings = settings
        self._user = None if os.getuid() else _other_user()
        found = binaries()
        assert found is not None, "PostgreSQL is not installed"
        self._bin = found
        if self._user is not None:
            os.chown(folder, self._user, -1)
        self._run("initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "test", "-E", "UTF8", "--no-locale", "-N")
        self.start()

    def url(self, schema: str | None = None) -> str:
        """A URL for `open_store`, of a schema with a name of its own if none is given."""
        return f"postgresql:///postgres?host={self._folder}&user=test&schema={schema or 's' + secrets.token_hex(6)}"

    def start(self) -> None:
        options = [f"--{name}={value}" for name, value in self._settings.items()]
        command = ["-D", str(self._folder / "data"), "-k", str(self._folder), "--listen_addresses=", *options]
        with (self._folder / "log").open("ab") as log:
            program = [str(self._bin / "postgres"), *command]
            self._process = subprocess.Popen(program, **self._as_user(), stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        ready = ["-h", str(self._folder), "-U", "test", "-q"]
        while subprocess.run([str(self._bin / "pg_isready"), *ready], check=False).returncode:
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline, "PostgreSQL did not start within 30 s"
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop at once, as after a crash: the next start recovers."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._bin / program), *arguments]
        subprocess.run(command, **self._as_user(), stdout=subprocess.DEVNULL, check=True)

    def _as_user(self) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        rights = {} if self._user is None else {"user": self._user, "group": "nogroup", "extra_groups": []}
        return {"env": environment, "cwd": self._folder, **rights}


def _other_user() -> int:
    names = {entry.pw_name: entry.pw_uid for entry in pwd.getpwall()}
    return names.get("postgres", names["nobody"])


@contextmanager
def running(*, durable: bool = False) -> Iterator[Postgres]:
    """A server that is stopped and removed in the end. `durable`: also safe if the machine loses its power."""
    folder = Path(tempfile.mkdtemp(prefix="lightningrl-pg-"))
    settings = {"max_connections": "100", "fsync": "on" if durable else "off"}
    try:
        server = Postgres(folder, settings=settings)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
