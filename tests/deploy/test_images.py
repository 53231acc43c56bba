"""The Dockerfiles: what they copy exists, and the build sees it.

CI builds them, where there is a Docker. `make wheels` installs the same wheel and extras.
"""

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

from tests.docs.blocks import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
RECIPE = ROOT / "deploy" / "recipe.Dockerfile"


def instructions(path: Path) -> list[tuple[str, list[str]]]:
    """Each instruction with its words."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip()]
    return [(name, shlex.split(rest)) for name, _, rest in (line.partition(" ") for line in lines)]


def sources() -> list[str]:
    copies = [words for name, words in instructions(DOCKERFILE) if name == "COPY"]
    return [word for words in copies for word in words[:-1] if not word.startswith("--")]


def test_what_is_copied_exists() -> None:
    assert len(sources()) == 7
    assert [source for source in sources() if not (ROOT / source).exists()] == []


def test_what_is_copied_is_not_ignored() -> None:
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in lines
    admitted = {line[1:] for line in lines if line.startswith("!")}
    assert admitted == set(sources())


def test_an_image_of_a_recipe_has_its_files_but_no_secrets() -> None:
    lines = RECIPE.with_name(f"{RECIPE.name}.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if not line.startswith("#")]
    names = [pattern.removeprefix("**/") for pattern in patterns]
    assert all(pattern.startswith("**/") and "/" not in name for pattern, name in zip(patterns, names, strict=True))

    def copied(path: str) -> bool:
        return not any(fnmatch.fnmatchcase(part, name) for part in path.split("/") for name in names)

    secrets = ["worker.key", ".env", "tls/key.pem", ".git/config", "runs/a/config.toml", ".venv/bin/python", "venv/x"]
    assert [path for path in secrets if copied(path)] == []
    recipe = ["recipe.toml", "agent.py", "requirements.txt", "warmstart/model.safetensors", "data/tasks.jsonl"]
    assert [path for path in recipe if not copied(path)] == []


def test_the_wheel_gets_what_it_is_made_of() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    made_of = [*(package.partition("/")[0] for package in wheel["packages"]), *wheel["force-include"]]
    assert [name for name in made_of if name not in sources()] == []


def test_every_image_ends_as_a_user_without_rights() -> None:
    for path, images in ((DOCKERFILE, {"worker", "server"}), (RECIPE, {"${BASE}"})):
        user: dict[str, str] = {}
        image = ""
        for name, words in instructions(path):
            image = words[-1] if name == "FROM" else image
            if name == "USER":
                user[image] = words[0]
        assert user == dict.fromkeys(images, "1000")


def test_signals_reach_the_program() -> None:
    [entry] = [words for name, words in instructions(DOCKERFILE) if name == "ENTRYPOINT"]
    assert entry == ["[tini,", "--]"]


def test_extras_and_bounds_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = DOCKERFILE.read_text()
    assert {"train", "gpu"} <= extras.keys() and "ARG EXTRA=train" in text
    [torch] = [package for package in extras["train"] if package.startswith("torch")]
    assert f"'{torch}'" in text


def test_no_registry_is_named() -> None:
    for path in (DOCKERFILE, RECIPE):
        bases = [words[0] for name, words in instructions(path) if name == "FROM"]
        assert all(fnmatch.fnmatch(base, "python:*-slim") or base in ("base", "${BASE}") for base in bases), bases
        assert "http" not in path.read_text()
