"""Recipes whose frameworks need a venv of their own, or Node: `make test-recipes`."""

from tests.conftest import model_folder  # noqa: F401  fixture
from tests.recipes.conftest import math, rag, server, shop  # noqa: F401  fixtures
