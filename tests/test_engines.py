"""Each policy gets an engine that is made from its own settings."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.cli.ready import check_servers
from lightningrl.config import Config
from lightningrl.engine.base import Engine
from lightningrl.engines import make_engine, make_engines, model_paths
from lightningrl.errors import LightningError, UserError
from lightningrl.gateway.scripted import PLAIN, ScriptedEngine
from lightningrl.recipe import make_config
from lightningrl.types import Sampling

PLUGINS = """
counter = iter(range(100))

def script(prompt, messages, tools):
    return f"answer {next(counter)}"

class Callable:
    def __call__(self, prompt, messages, tools):
        return "from an object"

instance = Callable()

class Engine:
    def __init__(self, setup):
        self.setup = setup

number = 5
"""
names = itertools.count()


@pytest.fixture(scope="module")
def plain() -> ChatTemplate:
    return ChatTemplate.load(PLAIN)


def recipe(folder: Path, attribute: str, *overrides: str, text: str = PLUGINS) -> Config:
    """A recipe whose engine is an attribute of a new module in `folder`."""
    module = f"plugins_{next(names)}"
    (folder / f"{module}.py").write_text(text)
    tree = {
        "name": "test",
        "agent": {"entry": "agent:run", "reward": "agent:reward"},
        "tasks": {"source": "tasks:rows"},
        "model": {"path": str(PLAIN)},
        "engine": {"name": f"{module}:{attribute}"},
    }
    return make_config(tree, overrides, folder=folder, where="test")


async def answer_of(engine: Engine, prompt_ids: Sequence[int], template: ChatTemplate) -> str:
    deltas = [delta async for delta in engine.generate(prompt_ids, sampling=Sampling(), policy="policy")]
    return template.decode(deltas[0].token_ids)


async def test_a_class_is_an_engine_and_any_other_callable_a_script(plain: ChatTemplate, tmp_path: Path) -> None:
    for attribute, answer in (("script", "answer 0"), ("instance", "from an object")):
        engine = make_engine(recipe(tmp_path, attribute), "policy", folder=PLAIN, template=plain)
        assert isinstance(engine, ScriptedEngine)
        assert await answer_of(engine, [1], plain) == answer
    made: Any = make_engine(recipe(tmp_path, "Engine"), "policy", folder=PLAIN, template=plain)
    assert made.setup.policy == "policy" and not isinstance(made, ScriptedEngine)
    with pytest.raises(UserError, match="is a `int`"):
        make_engine(recipe(tmp_path, "number"), "policy", folder=PLAIN, template=plain)


def test_a_module_that_cannot_be_imported_is_a_message(plain: ChatTemplate, tmp_path: Path) -> None:
    with pytest.raises(LightningError, match="`ZeroDivisionError`: division by zero"):
        make_engine(recipe(tmp_path, "script", text="1 / 0"), "policy", folder=PLAIN, template=plain)


def test_each_policy_is_served_with_its_own_dtype_device_and_model(plain: ChatTemplate, tmp_path: Path) -> None:
    policies = 'policies={solver={model={dtype="bfloat16", path="own"}}, checker={trainer={device="cpu"}}}'
    routes = 'routes=[{model="solver", policy="solver"}, {model="fixed", policy="frozen"}, {policy="checker"}]'
    config = recipe(tmp_path, "Engine", policies, routes, 'trainer.device="cuda"')
    assert model_paths(config) == {"solver": "own", "checker": str(PLAIN), "frozen": str(PLAIN)}
    folders = {path: Path(path) for path in model_paths(config).values()}
    model = object()
    engines: dict[str, Any] = make_engines(config, folders, template=plain, models={"solver": model})
    assert {policy: engine.setup.dtype for policy, engine in engines.items()} == {
        "solver": "bfloat16",
        "checker": "float32",
        "frozen": "float32",
    }
    assert {policy: engine.setup.device for policy, engine in engines.items()} == {
        "solver": "cuda",
        "checker": "cpu",
        "frozen": "cuda",
    }
    assert (engines["solver"].setup.folder, engines["solver"].setup.model) == (Path("own"), model)
    assert (engines["frozen"].setup.folder, engines["frozen"].setup.model) == (PLAIN, None)


def test_one_server_answers_for_adapters_and_for_the_model_under_them(plain: ChatTemplate, tmp_path: Path) -> None:
    servers, routes = (
        'engine={name="vllm", urls=["http://127.0.0.1:1"]}',
        'routes=[{model="fixed", policy="frozen"}, {}]',
    )
    config = recipe(tmp_path, "Engine", routes, servers, "model.lora_rank=8")
    folders = {path: Path(path) for path in model_paths(config).values()}
    assert set(make_engines(config, folders, template=plain)) == {"policy", "frozen"}
    config = recipe(tmp_path, "Engine", routes, servers)  # all weights learn, so the server has no others
    with pytest.raises(UserError, match="serves one model, but a route also needs `frozen`") as refused:
        make_engines(config, folders, template=plain)
    assert "`model.lora_rank=16`" in str(refused.value.hint) and "`[upstreams.NAME]`" in str(refused.value.hint)


def test_policies_that_one_vllm_cannot_serve_are_refused_before_it_is_looked_for(tmp_path: Path) -> None:
    routes, engine = "routes=[{policy='solver'}]", 'engine={name="vllm", python="/nowhere/python"}'
    alike, other = "policies={solver={}, checker={}}", "policies={solver={}, checker={model={path='other'}}}"
    with pytest.raises(UserError, match="also needs `checker`") as refused:
        check_servers(recipe(tmp_path, "Engine", routes, engine, other, "model.lora_rank=8"))
    assert "the same `model.path`" in str(refused.value.hint)
    with pytest.raises(UserError, match="also needs `checker`") as refused:
        check_servers(recipe(tmp_path, "Engine", routes, engine, alike))
    assert str(refused.value.hint).startswith("set `model.lora_rank=16`") and "upstream" not in str(refused.value.hint)
    with pytest.raises(UserError, match="/nowhere/python"):
        check_servers(recipe(tmp_path, "Engine", routes, engine, alike, "model.lora_rank=8"))
