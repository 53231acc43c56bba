"""Extras of the package: which packages they need (from the package's own metadata), and which are missing."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires

from lightningrl.errors import UserError

PACKAGE = "lightningrl"


def packages(extra: str) -> Iterator[str]:
    """Names of the packages in an extra."""
    for requirement in requires(PACKAGE) or ():
        name = re.match(r"[\w.-]+", requirement)
        if name and re.search(rf"extra == ['\"]{extra}['\"]", requirement):
            yield name.group()


def version_of(package: str) -> str | None:
    """The installed version; None: not installed."""
    try:
        return distribution(package).version
    except PackageNotFoundError:
        return None


def install(*extras: str) -> str:
    """The command that installs these extras."""
    return f'pip install "{PACKAGE}[{",".join(extras)}]"'


def require(*extras: str) -> None:
    """Raises `UserError` if packages of these extras are missing; it names them all."""
    missing = [package for extra in extras for package in packages(extra) if version_of(package) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        named = ", ".join(f"`{package}`" for package in missing)
        raise UserError(f"{named} {verb} not installed", hint=install(*extras))


def extra_of(module: str) -> str | None:
    """The extra that has a module; None if none has."""
    package = module.partition(".")[0].replace("_", "-")
    return next((extra for extra in ("train", "recipes") if package in packages(extra)), None)
