"""Where are the records of a run? In `store.sqlite` in its folder, or in the database that `store.url` there names.

`store.url` is written once, at the start of a run whose settings name a database. So everything that reads a run finds
its records by the folder alone, and each run in a database has a schema of its own.
"""

import re
import secrets
from pathlib import Path

from lightningrl.errors import UserError

FILE, NAMED = "store.sqlite", "store.url"


def url_of(folder: Path) -> str:
    """The URL of the store of the run in this folder."""
    named = folder / NAMED
    if named.is_file():
        return named.read_text(encoding="utf-8").strip()
    return f"sqlite://{folder.resolve() / FILE}"


def records_at(path: Path) -> tuple[Path, str] | None:
    """(file with the records or their URL, URL). `path`: the folder of a run, or that file. None: no records."""
    folder = path if path.is_dir() else path.parent
    files = [folder / NAMED, folder / FILE] if path.is_dir() else [path]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return None
    return file, url_of(folder) if file.name == NAMED else f"sqlite://{file.resolve()}"


def found_at(path: Path) -> tuple[Path, str]:
    """As `records_at`. Raises `UserError` if there are no records."""
    found = records_at(path)
    if found is None:
        raise UserError(f"no records at `{path}`", hint="give the folder of a run, e.g. `runs/…`, or its store.sqlite")
    return found


def settle(folder: Path, url: str) -> None:
    """Keep the records of the run in `folder` in the database at `url` (setting `store.url`). A PostgreSQL URL without
    a schema gets a new one, named after the folder.
    """
    named = folder / NAMED
    if not url or named.exists():
        return
    if url.startswith("postgresql://") and "schema=" not in url.partition("?")[2]:
        name = re.sub(r"[^a-z0-9_-]", "-", folder.resolve().name.lower())[:48]
        url += f"{'&' if '?' in url else '?'}schema=run-{name}-{secrets.token_hex(3)}"
    named.touch(mode=0o600)  # the URL may have a password in it
    named.write_text(url + "\n", encoding="utf-8")
