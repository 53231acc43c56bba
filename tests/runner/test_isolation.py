"""Programs in a sandbox: what works as ever, and what they cannot do, whatever they try."""

import asyncio
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from lightningrl.config import AgentConfig
from lightningrl.errors import AgentError, UserError
from lightningrl.runner import Outcome, isolation
from lightningrl.runner.conformance import attempt
from lightningrl.runner.environment import addresses
from lightningrl.runner.pool import WorkerPool
from tests.runner.processes import alive, gone


def _why_not() -> str | None:
    try:
        isolation.check()
    except UserError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(sys.platform != "linux" or _why_not() is not None, reason=f"no sandboxes: {_why_not()}")


@asynccontextmanager
async def model() -> AsyncIterator[str]:
    """A gateway that says hello."""

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text=f"hello {request.headers.get('authorization')} {len(await request.read())}")

    app = web.Application(client_max_size=2**27)
    app.router.add_route("*", "/{path:.*}", hello)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def pool(
    root: Path, program: str, *, command: tuple[str, ...] = ("python", "agent.py"), **more: Any
) -> AsyncIterator[WorkerPool]:
    (root / "agent.py").write_text(program)
    (root / "grader.py").write_text("def reward(task, output):\n    return 1\n")
    agent = AgentConfig(
        command=list(command), reward="grader:reward", workers=1, concurrency=8, isolation="bwrap", **more
    )
    runner = WorkerPool(agent, root=root)
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


async def run(
    runner: WorkerPool, name: str = "1", *, url: str = "http://127.0.0.1:9999", timeout_s: float = 60.0, **task: Any
) -> Outcome:
    rollout, tried, _ = attempt(task, name=name, timeout_s=timeout_s)
    return await runner.run(rollout, tried, addresses(url, key=tried.token))


async def answer(root: Path, program: str, **more: Any) -> Any:
    async with pool(root, program, **more) as runner:
        outcome = await run(runner)
    assert outcome.status == "succeeded", outcome.error
    return outcome.output


async def failure(root: Path, program: str, **more: Any) -> str:
    async with pool(root, program, **more) as runner:
        outcome = await run(runner)
    assert outcome.status == "failed" and outcome.error, outcome
    return outcome.error


CALL = """
import json, os, sys, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/x", data=b"x" * int(json.load(sys.stdin)["size"]),
                                 headers={"authorization": os.environ["OPENAI_API_KEY"]})
text = urllib.request.urlopen(request).read().decode()
answer = [text, os.getcwd(), json.loads(os.environ["LIGHTNINGRL_TASK"])]
open(os.environ["LIGHTNINGRL_OUTPUT"], "w").write(json.dumps(answer))
"""


async def test_a_program_gets_its_task_its_model_and_its_folder_as_without_a_sandbox(tmp_path: Path) -> None:
    async with model() as url, pool(tmp_path, CALL) as runner:
        sizes = [0, 1, 30_000_000]
        outcomes = await asyncio.gather(*(run(runner, str(i), url=url, size=n) for i, n in enumerate(sizes)))
    for i, outcome in enumerate(outcomes):
        assert outcome.status == "succeeded", outcome.error
        assert outcome.output == [f"hello token-{i} {sizes[i]}", str(tmp_path), {"size": sizes[i]}]


async def test_a_failing_program_is_reported_as_without_a_sandbox(tmp_path: Path) -> None:
    error = await failure(tmp_path, "raise ValueError('no such table')")
    assert error.splitlines()[0] == "AgentError: `python` exited with code 1: ValueError: no such table"
    error = await failure(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert error.splitlines()[0].startswith("AgentError: `python` was ended by SIGSEGV")


LOOK = """
import json, os
def listed(path):
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        return error.strerror
def written(path):
    try:
        open(path, "w").write("x")
        return True
    except OSError as error:
        return False
home, root = os.environ["HOME"], os.getcwd()
import pwd
print(json.dumps({
    "home": listed(home), "real home": listed(os.environ["REAL"]), "tmp": listed("/tmp"),
    "run": listed("/run"), "var": listed("/var"), "runs": listed(root + "/runs"),
    "secret": listed(os.environ["SECRET"]),
    "writes": [path for path in (home + "/x", "/tmp/x", "/dev/shm/x", root + "/x", root + "/runs/x", "/x", "/usr/x",
               "/etc/x", "/dev/x", "/proc/sys/kernel/hostname", "/proc/self/comm") if written(path)],
    "processes": [name for name in os.listdir("/proc") if name.isdigit()],
}))
"""


async def test_it_reads_no_home_and_no_runs_and_writes_only_what_is_its_own(tmp_path: Path) -> None:
    root, secret = tmp_path / "recipe", tmp_path / "secret"
    (root / "runs" / "now").mkdir(parents=True)
    (root / "runs" / "now" / "worker.key").write_text("key")
    secret.mkdir()
    (secret / "key").write_text("key")
    env = {"REAL": os.path.expanduser("~"), "SECRET": str(secret), "PYTHONPATH": str(tmp_path)}
    seen = await answer(root, LOOK, env=env)
    assert seen["home"] == [] and seen["runs"] == [] and seen["secret"] == "No such file or directory"
    assert "key" not in str(seen["real home"]) and ".bashrc" not in seen["real home"]
    assert seen["run"] == seen["var"] == "No such file or directory"
    assert seen["writes"] == ["/home/agent/x", "/tmp/x", "/dev/shm/x"] and len(seen["processes"]) == 2
    seen = await answer(root, LOOK, env=env, readable=["../secret"])
    assert seen["secret"] == ["key"]


KEY = """
import json
try:
    said = open("worker.key").read()
except OSError as error:
    said = error.strerror
print(json.dumps([said, open("data.txt").read()]))
"""


async def test_it_cannot_read_a_worker_key_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("data")
    (tmp_path / "worker.key").write_text("key")
    said, data = await answer(tmp_path, KEY)
    assert "key" not in said and data == "data"


CODEX = """
import json, os
home = os.environ["CODEX_HOME"]
open(home + "/history", "w").write("x")
runs = [name for _, _, names in os.walk("runs") for name in names]
print(json.dumps([runs, "lightningrl" in open(home + "/config.toml").read()]))
"""


async def test_codex_has_its_configuration_and_nothing_else_of_the_run(tmp_path: Path) -> None:
    run_folder = tmp_path / "runs" / "now"
    run_folder.mkdir(parents=True)
    (run_folder / "store.db").write_text("tokens")
    (tmp_path / "agent.py").write_text(CODEX)
    (tmp_path / "grader.py").write_text("def reward(task, output):\n    return 1\n")
    agent = AgentConfig(command=["python", "agent.py"], reward="grader:reward", workers=1, isolation="bwrap")
    env = addresses("http://127.0.0.1:9999", key="k")
    runner = WorkerPool(agent, root=tmp_path, env=env, log_path=run_folder / "agents.log")
    try:
        await runner.start()
        outcome = await run(runner)
    finally:
        await runner.close()
    assert outcome.status == "succeeded", outcome.error
    assert sorted(outcome.output[0]) == ["config.toml", "history"] and outcome.output[1]
    assert not (run_folder / "codex" / "history").exists()


CONNECT = """
import json, os, socket, sys
task, found = json.load(sys.stdin), []
for address in ((task["host"], task["port"]), ("127.0.0.1", task["port"]), ("1.1.1.1", 53), task["path"],
                "\\0" + task["path"]):
    try:
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as there:
            there.settimeout(2)
            there.connect(address)
            found.append(address)
    except OSError:
        pass
print(json.dumps(found))
"""


async def test_it_connects_to_nothing_but_its_model(tmp_path: Path) -> None:
    root, path = tmp_path / "recipe", str(tmp_path / "socket")
    root.mkdir()
    with (
        socket.create_server(("0.0.0.0", 0)) as other,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        unix.bind(path)
        abstract.bind(f"\0{path}")
        for server in (unix, abstract):
            server.listen()
        task = {"host": socket.gethostname(), "port": other.getsockname()[1], "path": path}
        async with pool(root, CONNECT) as runner:
            outcome = await run(runner, **task)
            assert outcome.output == [], outcome
        (root / "plain.py").write_text(CONNECT)
        open_to_all = AgentConfig(command=["python", "plain.py"], reward="grader:reward", workers=1)
        plain = WorkerPool(open_to_all, root=root)
        try:
            await plain.start()
            outcome = await run(plain, **task)
            assert ["127.0.0.1", task["port"]] in outcome.output and path in outcome.output, "the test could fail"
        finally:
            await plain.close()


BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


async def while_others_go_on(root: Path, program: str, **more: Any) -> Outcome:
    """The outcome of a program that misbehaves, while another attempt of its worker runs."""
    (root / "good.py").write_text("import time; time.sleep(1); print(7)")
    (root / "bad.py").write_text(program)
    chosen = "import json, sys\nexec(open('good.py' if json.load(sys.stdin)['good'] else 'bad.py').read())"
    async with pool(root, chosen, **more) as runner:
        bad, good = await asyncio.gather(run(runner, "bad", good=False, timeout_s=15), run(runner, "good", good=True))
        assert good.status == "succeeded" and good.output == 7, good
        assert (await run(runner, "later", good=True)).output == 7, "the worker goes on"
    return bad


async def test_a_fork_bomb_ends_with_its_attempt(tmp_path: Path) -> None:
    before = len(os.listdir("/proc"))
    began = time.monotonic()
    bad = await while_others_go_on(tmp_path, BOMB, processes=50)
    assert bad.status in ("failed", "timeout") and time.monotonic() - began < 60
    if os.geteuid() == 0:  # the kernel does not count the processes of root
        assert "more than `50` processes" in (bad.error or "")
    assert len(os.listdir("/proc")) < before + 50


async def test_memory_ends_where_the_recipe_says(tmp_path: Path) -> None:
    one = "x = b'x' * 2**29"
    bad = await while_others_go_on(tmp_path, one, memory_gib=0.25)
    assert bad.status == "failed" and "MemoryError" in (bad.error or "")
    many = "import os, time\nos.fork(); os.fork(); os.fork()\nx = b'x' * 2**27\ntime.sleep(60)"
    bad = await while_others_go_on(tmp_path, many, memory_gib=0.25)
    assert bad.status == "failed" and "more than `0.25` GiB of memory" in (bad.error or "")


HIDDEN = {
    "in processes that do not say": """
import ctypes, os, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
os.fork(); os.fork()
x = b"x" * 2**27
""",
    "in segments": """
import ctypes, time
libc = ctypes.CDLL(None)
libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
for _ in range(4):
    place = libc.shmat(libc.shmget(0, ctypes.c_size_t(2**27), 0o1600), None, 0)
    ctypes.memset(place, 1, 2**27)
    assert libc.shmdt(ctypes.c_void_p(place)) == 0
""",
}


@pytest.mark.parametrize("place", HIDDEN)
async def test_memory_cannot_be_hidden(tmp_path: Path, place: str) -> None:
    error = await failure(tmp_path, HIDDEN[place] + "time.sleep(5)\nprint(1)", memory_gib=0.25)
    assert "more than `0.25` GiB of memory" in error


FILL = """
import os
piece, left = b"x" * 2**20, []
for place in ("/tmp", os.environ["HOME"], "/dev/shm", os.path.dirname(os.environ["LIGHTNINGRL_OUTPUT"])):
    for name in ("a", "b"):
        size = 0
        try:
            with open(f"{place}/{name}", "wb", buffering=0) as file:
                for _ in range(10 * 2**10):
                    size += file.write(piece)
        except OSError:
            pass
        left.append(size)
size = 0
try:
    with open(os.environ["LIGHTNINGRL_OUTPUT"], "wb", buffering=0) as file:
        for _ in range(10 * 2**10):
            size += file.write(piece)
except OSError:
    pass
open(os.environ["LIGHTNINGRL_OUTPUT"], "w").close()
print([size, *left])
"""


async def test_ten_gigabytes_do_not_fit_into_its_files(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    bad = await while_others_go_on(tmp_path, FILL, file_gib=1 / 64)
    assert bad.status == "succeeded", bad.error
    output, *places = bad.output
    assert output == 2**24 and all(a + b <= 2**24 for a, b in zip(places[::2], places[1::2], strict=True)), bad.output
    assert shutil.disk_usage(tmp_path).free > free - 2**28


async def test_a_gigabyte_on_stdout_is_refused(tmp_path: Path) -> None:
    bad = await while_others_go_on(tmp_path, "import sys\nfor _ in range(1024): sys.stdout.write('x' * 2**20)")
    assert bad.status == "failed" and "the agent printed more than" in (bad.error or "")


STUBBORN = """
import os, signal, subprocess, sys, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, signal.SIG_IGN)
mark = %r
for leaves in (False, True):
    command = [sys.executable, "-S", "-c", f"import time; time.sleep(600) # {mark}"]
    subprocess.Popen(command, start_new_session=True, env={} if leaves else None)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
time.sleep(%r)
print(1)
"""


def named(mark: str) -> list[int]:
    """Processes of this machine with this mark in their command lines."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            pass
    return found


@pytest.mark.parametrize(("sleep_s", "status"), [(0.3, "succeeded"), (600, "timeout")])
async def test_all_that_it_started_ends_with_it_whatever_session_or_signals(
    tmp_path: Path, sleep_s: float, status: str
) -> None:
    mark = f"mark-{os.getpid()}-{status}"
    async with pool(tmp_path, STUBBORN % (mark, sleep_s)) as runner:
        running = asyncio.create_task(run(runner, timeout_s=3.0))
        async with asyncio.timeout(60):
            while len(named(mark)) < 2:
                await asyncio.sleep(0.02)
        processes = named(mark)
        assert all(map(alive, processes))
        assert (await running).status == status
        assert await gone(processes) and not named(mark)


ESCAPE = """
import ctypes, json, os, signal, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def fails(*arguments):
    return libc.syscall(*arguments) != 0
found = {
    "mounts": fails(165, b"none", b"/tmp", b"tmpfs", 0, 0), "user namespace": fails(272, 0x10000000),
    "hostname": libc.sethostname(b"x", 1) != 0,
    "traces its guard": libc.ptrace(16, 1, 0, 0) != 0,
    "caps": [line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")],
    "privileges": next(line.split()[1] for line in open("/proc/self/status") if line.startswith("NoNewPrivs")),
}
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV):
    os.kill(1, number)
found["limits"] = True
import resource
try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
except ValueError:
    found["limits"] = False
print(json.dumps(found))
"""


async def test_it_has_no_privileges_and_cannot_shake_off_its_guard(tmp_path: Path) -> None:
    found = await answer(tmp_path, ESCAPE)
    assert found.pop("caps") == ["0" * 16] * 5 and found.pop("privileges") == "1" and not found.pop("limits")
    assert all(found.values()), found


async def test_a_program_outside_the_sandbox_is_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "recipe").mkdir()
    program = tmp_path / "elsewhere" / "agent"
    program.write_text("#!/bin/sh\necho 1\n")
    program.chmod(0o755)
    with pytest.raises(AgentError, match=r"is not in the sandbox\nhint: .*agent\.readable"):
        await answer(tmp_path / "recipe", "", command=(str(program),))
    assert await answer(tmp_path / "recipe", "", command=(str(program),), readable=["../elsewhere"]) == 1


def test_a_missing_or_forbidden_bubblewrap_is_reported_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"No permissions to create new namespace\nhint: allow user namespaces"):
        isolation.check()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"not installed\nhint: `apt install bubblewrap`"):
        isolation.check()


def test_functions_have_no_sandbox() -> None:
    with pytest.raises(ValidationError, match="give `command` in place of `entry`"):
        AgentConfig(entry="agent:run", isolation="bwrap")
