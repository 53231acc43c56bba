"""A PostgreSQL server for the tests of the store."""

from collections.abc import Iterator

import pytest

from tests.postgres import Postgres, binaries, running


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with running() as server:
        yield server
