"""The code of docs/air.md works, and its table has every rule."""

import re
import sys
import tomllib
from pathlib import Path

from lightningrl import Span, plugins
from lightningrl.algorithms import air
from lightningrl.algorithms.air import air_rewards
from lightningrl.config import AirConfig, AlgorithmConfig

TEXT = (Path(__file__).parents[2] / "docs" / "air.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_the_table_has_every_rule_and_says_what_its_code_says() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", TEXT, re.MULTILINE))
    for name in plugins.BUILTIN["air"]:
        said = re.sub(r"\W+", " ", getattr(air, name).__doc__).lower().split()
        assert re.sub(r"\W+", " ", rows.pop(name)).lower().split() == said, name


def test_the_recipe_and_the_rule_in_it_work(tmp_path: Path) -> None:
    [recipe] = blocks("toml")
    [module] = [block for block in blocks("python") if "my_rules" in block]
    (tmp_path / "my_rules.py").write_text(module)
    tree = tomllib.loads(recipe)
    assert AlgorithmConfig.model_validate(tree["algorithm"]).shaping == "potential"
    rules = [AirConfig.model_validate(rule) for rule in tree["air"]]
    query = Span(id="1", attempt_id="a", call_id="c", kind="tool", name="query", output="a\nb")
    search = Span(id="2", attempt_id="a", call_id="c", kind="tool", name="search_web", status="error", ended_at=3.0)
    found = [(r.name, r.value) for r in air_rewards([query, search], rules, root=tmp_path)]
    assert found == [("tool_failed", -0.2), ("slow", -0.1), ("my_rules:rows_found", 0.1)]
    sys.modules.pop("my_rules")
