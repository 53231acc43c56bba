import subprocess
import sys
from pathlib import Path

import pytest

from lightningrl import plugins
from lightningrl.errors import UserError


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        plugins.load("grop", kind="advantage")
    assert "unknown advantage `grop`" in caught.value.message
    assert "`grpo`" in (caught.value.hint or "")


def test_a_recipe_s_own_module_is_found_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_own_credit.py").write_text("def credit(t): return 1\n")
    assert plugins.load("my_own_credit:credit", kind="credit", root=tmp_path)(None) == 1


def test_a_missing_attribute_or_module_is_named() -> None:
    with pytest.raises(UserError, match="has no `nothing`"):
        plugins.load("json:nothing", kind="credit")
    with pytest.raises(UserError, match="no module `no_such_module`"):
        plugins.load("no_such_module:x", kind="credit")


def test_importing_lightningrl_loads_no_torch() -> None:
    code = "import sys, lightningrl, lightningrl.config, lightningrl.store, lightningrl.engine, lightningrl.data; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
