"""The files of the page: all are there, vendored ones are unchanged, and nothing in them turns data into markup."""

import gzip
import hashlib
import posixpath
import re
from pathlib import Path

import lightningrl

PAGE = Path(lightningrl.__file__).parent / "ui" / "page"
VENDOR = PAGE / "vendor"
OURS = sorted(path for path in PAGE.rglob("*.js") if path.parent != VENDOR or path.name == "preact.js")
SERVED = sorted(path for path in PAGE.rglob("*") if path.suffix in {".html", ".js", ".mjs", ".css", ".svg"})
IMPORT = re.compile(r'^(?:import|export)\s+(?:[^"\';]*?\sfrom\s+)?"([^"]+)";$', re.MULTILINE)
LIMIT = 150_000
"""Bytes of all files together, each compressed with gzip."""


def name_of(path: Path) -> str:
    return path.relative_to(PAGE).as_posix()


def imports_of(path: Path) -> list[str]:
    """Paths of the modules that a module imports, relative to the page's folder."""
    return [posixpath.normpath(posixpath.join(posixpath.dirname(name_of(path)), found)) for found in path_imports(path)]


def path_imports(path: Path) -> list[str]:
    return IMPORT.findall(path.read_text(encoding="utf-8"))


def test_every_import_names_a_file_of_the_page():
    missing = {name_of(path): [each for each in imports_of(path) if not (PAGE / each).is_file()] for path in OURS}
    assert not {name: names for name, names in missing.items() if names}
    assert all(each.startswith(".") for path in OURS for each in path_imports(path))


def test_index_refers_to_files_of_the_page():
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="([^"#]+)"', index)
    assert {"app.js", "style.css", "style-rollouts.css"} <= set(named)
    assert [name for name in named if not (PAGE / name).is_file()] == []


def test_something_is_painted_before_any_script_has_run():
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    head = re.search(r'<div id="page">(.+)</div>', index)
    assert head is not None and "LightningRL" in re.sub("<[^>]*>", "", head[1])
    drawn = re.sub(r"\s+/?>", ">", (PAGE / "app.js").read_text(encoding="utf-8"))
    assert re.sub(r"^<header[^>]*>|</header>$", "", head[1]) in drawn, "it would jump"


def test_every_module_is_reached_from_the_app():
    reached, todo = set[str](), ["app.js"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += imports_of(PAGE / name)
    unused = {name_of(path) for path in OURS} - reached
    assert not unused


def test_every_imported_name_is_exported():
    exported = {
        name_of(path): set(re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", text, re.MULTILINE))
        | {
            name.strip()
            for names in re.findall(r"^export \{([^}]*)\}", text, re.MULTILINE)
            for name in names.split(",")
        }
        for path in OURS
        for text in [path.read_text(encoding="utf-8")]
    }
    wrong = [
        (name_of(path), name.strip())
        for path in OURS
        for names, target in re.findall(
            r'^import (?:\w+, )?\{([^}]*)\} from "([^"]+)";', path.read_text(encoding="utf-8"), re.MULTILINE
        )
        if (of := posixpath.normpath(posixpath.join(posixpath.dirname(name_of(path)), target))) in exported
        for name in names.split(",")
        if name.strip() and name.split(" as ")[0].strip() not in exported[of]
    ]
    assert wrong == []


def test_vendored_files_are_those_of_the_table():
    table = (VENDOR / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| .* \| [^|]*`(LICENSE-\w+)` \| `([0-9a-f]{64})` \|$", table, re.MULTILINE)
    assert {name for name, _, _ in rows} == {
        path.name for path in VENDOR.iterdir() if path.suffix in {".mjs", ".css", ".js"} and path.name != "preact.js"
    }
    for name, licence, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
        assert "ermission" in (VENDOR / licence).read_text(encoding="utf-8"), licence


def test_nothing_becomes_markup_or_code():
    """Data is shown as text; a content security policy forbids the rest, and must never be needed."""
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(\"(?:style|on)"
    found = [(name_of(path), word) for path in OURS for word in re.findall(ways, path.read_text(encoding="utf-8"))]
    assert found == []


def test_markup_has_no_inline_scripts_or_styles():
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", index)
    quoted = [name_of(path) for path in OURS if re.search(r'\sstyle="', path.read_text(encoding="utf-8"))]
    assert quoted == []


def test_nothing_is_loaded_from_elsewhere():
    texts = {
        name_of(path): path.read_text(encoding="utf-8") for path in [*OURS, *PAGE.glob("*.css"), PAGE / "index.html"]
    }
    assert [name for name, text in texts.items() if re.search(r"(?:https?:)?//(?:[\w-]+\.)+[a-z]{2,}/", text)] == []


def test_the_page_is_small():
    assert sum(len(gzip.compress(path.read_bytes(), 9)) for path in SERVED) <= LIMIT


def test_every_module_begins_with_what_it_is_for():
    assert [name_of(path) for path in OURS if not path.read_text(encoding="utf-8").startswith("// ")] == []
