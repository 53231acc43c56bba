"""What does a logger remember across restarts? A small JSON file in the run's folder: `loggers/NAME.json`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Notes:
    """Names and JSON values. A written value is on disk when `write` returns."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / "loggers" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.json"
        self._values: dict[str, Any] = {}
        if self._file.exists():
            self._values = json.loads(self._file.read_text(encoding="utf-8"))

    def read(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def write(self, values: Mapping[str, Any]) -> None:
        """Replace these values. The others stay."""
        self._values |= values
        self._file.parent.mkdir(exist_ok=True)
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(self._values), encoding="utf-8")
        draft.replace(self._file)
