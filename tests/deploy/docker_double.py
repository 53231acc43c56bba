"""Docker, as far as `deploy/in-container.sh` uses it: a daemon that owns the containers, and its client.

The daemon is a thread of the tests, so no worker is above a container, and none can end it. As with Docker, the client
only passes bytes on; when it is gone, the container's stdin is closed, and nothing else happens. The behaviour is that
of Docker 20.10, against which the script was tried.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import IO

CLIENT = f"""#!{sys.executable} -IS
import json, os, socket, sys, threading

connection = socket.socket(socket.AF_UNIX)
connection.connect({{path!r}})
connection.sendall(json.dumps([sys.argv[1:], dict(os.environ)]).encode() + b"\\n")

def send():
    while data := os.read(0, 65536):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)

threading.Thread(target=send, daemon=True).start()
for line in connection.makefile("rb"):
    kind, text = json.loads(line)
    if kind == 0:
        os._exit(text)
    os.write(kind, text.encode("latin-1"))
"""
ALONE = ("--rm", "--interactive", "--init")
"""Options without a value. All others have theirs behind `=`, or in the next word."""


class Daemon:
    """Runs a program for each client. `client` is the path of the client's program."""

    def __init__(self, folder: Path) -> None:
        self.client = folder / "docker"
        self.containers: list[subprocess.Popen[bytes]] = []
        self.options: list[list[str]] = []
        path = folder / "docker.sock"
        self.client.write_text(CLIENT.format(path=str(path)))
        self.client.chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for container in self.containers:
            _end(container)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as received:
            command, environment = self._asked(json.loads(received.readline()))
            with subprocess.Popen(
                command,
                env={"PATH": os.environ["PATH"], **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            ) as container:
                self.containers.append(container)
                assert container.stdin and container.stdout and container.stderr
                threads = [
                    threading.Thread(target=_pass_on, args=(1, container.stdout, connection)),
                    threading.Thread(target=_pass_on, args=(2, container.stderr, connection)),
                    threading.Thread(target=_feed, args=(received, container.stdin)),
                ]
                for thread in threads:
                    thread.start()
                code = container.wait()
                _end(container)
                for thread in threads[:2]:
                    thread.join()
                with suppress(OSError):
                    connection.sendall(json.dumps([0, code if code >= 0 else 128 - code]).encode() + b"\n")
                    connection.shutdown(socket.SHUT_RDWR)
                threads[2].join()

    def _asked(self, request: tuple[list[str], dict[str, str]]) -> tuple[list[str], dict[str, str]]:
        """The program of a container, and its environment."""
        (verb, *words), given = request
        assert verb == "run"
        options: list[str] = []
        names: list[str] = []
        while words[0].startswith("-"):
            option = words.pop(0)
            value = "" if option in ALONE or "=" in option else words.pop(0)
            options.append(f"{option} {value}".rstrip())
            names += [value] if option == "--env" else []
        self.options.append(options)
        return words[1:], {name: given[name] for name in names if name in given}


def _feed(received: BufferedReader, stdin: IO[bytes]) -> None:
    """The client's stdin is the container's; when the client is gone, that is closed."""
    with suppress(OSError):
        while data := received.read1(65536):
            stdin.write(data)
            stdin.flush()
    with suppress(OSError):
        stdin.close()


def _pass_on(number: int, source: IO[bytes], connection: socket.socket) -> None:
    while data := os.read(source.fileno(), 65536):
        with suppress(OSError):
            connection.sendall(json.dumps([number, data.decode("latin-1")]).encode() + b"\n")


def _end(container: subprocess.Popen[bytes]) -> None:
    """All of a container's processes end with its first one."""
    with suppress(ProcessLookupError):
        os.killpg(container.pid, 9)
    container.wait()
