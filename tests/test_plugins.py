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


def test_two_recipes_in_one_process_each_get_their_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("one", "other"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "my_tasks.py").write_text(
            "from inner.words import word\nfrom my_words import more\ndef tasks(): return [word, more]\n"
        )
        (tmp_path / name / "inner" / "__init__.py").touch()
        (tmp_path / name / "inner" / "words.py").write_text(f"word = {name!r}\n")
        (tmp_path / name / "my_words.py").write_text(f"more = {name!r}\n")
    for name in ("one", "other", "one", "one"):
        assert plugins.load("my_tasks:tasks", kind="tasks", root=tmp_path / name)() == [name, name]
    kept = sys.modules["my_tasks"]
    plugins.load("my_tasks:tasks", kind="tasks", root=tmp_path / "one")
    assert sys.modules["my_tasks"] is kept, "nothing is loaded twice that need not be"
    assert plugins.load("json:loads", kind="tasks", root=tmp_path / "one")("1") == 1


def test_a_missing_attribute_or_module_is_named() -> None:
    with pytest.raises(UserError, match="has no `nothing`"):
        plugins.load("json:nothing", kind="credit")
    with pytest.raises(UserError, match="no module `no_such_module`"):
        plugins.load("no_such_module:x", kind="credit")


def test_importing_lightningrl_loads_no_torch() -> None:
    modules = "lightningrl, lightningrl.config, lightningrl.store, lightningrl.engine, lightningrl.data"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
