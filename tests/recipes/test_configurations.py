"""Every configuration of every recipe resolves. Without a GPU, those at full size name what is missing."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightningrl.cli.app import app
from lightningrl.cli.ready import check_servers
from lightningrl.engine.vllm_package import installed
from lightningrl.errors import UserError
from lightningrl.recipe import load_config

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = sorted(RECIPES.glob("*/*.toml"))
FULL_SIZE = sorted(RECIPES.glob("*/gpu.toml"))


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", ALL, ids=name)
def test_a_dry_run_takes_every_configuration(path: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert load_config(path).agent.reward_range == (0, 1)


def test_the_recipes_of_the_paper_have_a_full_size() -> None:
    assert {path.parent.name for path in FULL_SIZE} >= {
        "sql_langgraph",
        "rag_openai_agents",
        "math_autogen",
        "multi_agent",
    }


@pytest.mark.parametrize("path", FULL_SIZE, ids=name)
def test_a_full_size_needs_no_server_but_vllm(path: Path) -> None:
    config = load_config(path)
    assert config.engine.owns_vllm
    if installed("") is not None:
        pytest.skip("vLLM is installed here")
    with pytest.raises(UserError, match=r"vLLM is not installed in this Python") as caught:
        check_servers(config)
    assert 'pip install "lightningrl[gpu]"' in str(caught.value.hint)


@pytest.mark.parametrize("path", FULL_SIZE, ids=name)
def test_a_full_size_without_its_given_server_says_that_it_needs_a_gpu(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        config = load_config(path, [f'engine.urls=["http://127.0.0.1:{port}/v1"]'])
        check_servers(config)
    with pytest.raises(UserError) as caught:
        check_servers(config)
    assert caught.value.message.startswith(f"no server for engine `vllm` at `http://127.0.0.1:{port}/v1`: ")
    assert "on a machine with a GPU (docs/engines.md)" in str(caught.value.hint)
    check_servers(load_config(path, ["engine.name=embedded"]))  # as the hint says
