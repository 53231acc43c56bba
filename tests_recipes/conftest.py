"""Recipes whose frameworks need a venv of their own, or Node: `make test-recipes`."""
