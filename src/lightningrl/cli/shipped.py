"""Where are the recipes that come with the package?"""

from pathlib import Path


def shipped(recipe: str) -> Path:
    """The folder of a recipe: beside the package in a wheel, two folders up in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside, checkout = package / "recipes", package.parent.parent / "recipes"
    return (inside if inside.exists() else checkout) / recipe
