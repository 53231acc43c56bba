from tests.recipes.conftest import server  # noqa: F401  fixture
