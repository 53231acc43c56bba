"""SkyRL servers for the tests. One serves a whole session; a test that kills a server has one of its own."""

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests_tinker.server import MODEL, Server, free_port

URL, SERVED = "TINKER_TEST_URL", "TINKER_TEST_MODEL"


def pytest_configure(config: pytest.Config) -> None:
    """The SDK's loop lives as long as the process, and leaves its connections open."""
    config.addinivalue_line("filterwarnings", "ignore:unclosed:ResourceWarning")
    warnings.filterwarnings("ignore", "unclosed", ResourceWarning)  # what is left when the session ends


@pytest.fixture(scope="session", autouse=True)
def key() -> Iterator[None]:
    """Any key opens a server of one's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-dummy")
        yield


@pytest.fixture(scope="session")
def service_url(shared_server: Server | None) -> str:
    """Address of a server that is not stopped while tests run: that in `TINKER_TEST_URL`, or one of the session's."""
    return os.environ[URL] if shared_server is None else shared_server.url


@pytest.fixture(scope="session")
def service_model() -> Path:
    """Folder of the model that the server at `service_url` serves: its name there, and its tokenizer."""
    return Path(os.environ.get(SERVED, MODEL))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server | None]:
    """None: the tests use a server that runs already."""
    if URL in os.environ:
        assert SERVED in os.environ, f"set {SERVED} to the folder of the model that is served, too"
        yield None
        return
    yield from _served(tmp_path_factory.mktemp("server"))


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may `kill` and `start` again."""
    yield from _served(tmp_path / "server")


def _served(folder: Path) -> Iterator[Server]:
    server = Server(folder=folder, model=MODEL, port=free_port())
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)
