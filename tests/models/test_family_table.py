"""The table of families in docs/engines.md says how each of them runs."""

import re
from pathlib import Path

import pytest
import torch

from lightningrl.models.any_hf import AnyHF
from lightningrl.models.dense import FAMILIES
from lightningrl.models.families import decoder_of
from tests.models.tiny_families import FLAT, ROWS, build

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
ROW = re.compile(r"^\| (fast|flat|rows) \| (.*) \| (.*) \|$", re.MULTILINE)
TABLE = [
    (way, set(re.findall(r"`(\w+)`", families)), "`embedded`" in engines)
    for way, families, engines in ROW.findall(PAGE.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("family", [*FLAT, *ROWS])
def test_the_table_says_how_a_family_runs(family: str) -> None:
    model = decoder_of(build(family, dtype=torch.float32))
    assert isinstance(model, AnyHF)
    way = "rows" if model.shape.by_rows else "flat"
    kind = model.hf.config.model_type
    assert [(w, e) for w, families, e in TABLE if kind in families and w != "fast"] == [(way, model.no_cache is None)]


def test_the_table_names_only_what_is_tested() -> None:
    assert TABLE[0] == ("fast", set(FAMILIES), True)
    tested = {config().model_type for config in (FLAT | ROWS).values()}
    assert set.union(*(families for way, families, _ in TABLE if way != "fast")) == tested
