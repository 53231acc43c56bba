"""Recipes whose frameworks need a venv of their own: `make test-recipes`."""

from tests.recipes.conftest import math, rag, server  # noqa: F401  fixtures
