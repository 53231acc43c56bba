"""What `lightningrl doctor` says of a real server, and which models answer there that are not trained."""

import json
from pathlib import Path

import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.cli.hosted_checks import check_service, service_checks
from lightningrl.config import Config
from lightningrl.engines import make_engines
from lightningrl.errors import UserError
from lightningrl.hosted.adapters import RemotePolicy
from lightningrl.hosted.kept import write_saved
from lightningrl.hosted.service import Service
from lightningrl.recipe import make_config
from lightningrl.types import Sampling
from tests.command import run_command
from tests_tinker.server import NEAR

ASKED = [5, 6, 7, 8]


def config(url: str, *settings: str) -> Config:
    tree = {"name": "d", "agent": {"entry": "agent:run"}, "model": {"path": "warmstart", "lora_rank": 4}}
    return make_config(tree, ["backend=tinker", f"service.url={url}", *settings], folder=Path.cwd(), where="test")


def test_doctor_finds_nothing_wrong_with_the_server_and_lists_its_model(
    service_url: str, service_model: Path, tmp_path: Path
) -> None:
    done = run_command("doctor", "--backend", "tinker", f"service.url={service_url}", "--json", cwd=tmp_path)
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 0, done.stderr
    assert found["format"]["found"] == "the service reads JSON", "which 0.24.1 writes, and later SDKs do not"
    assert found["models"]["found"] == f"offered: `{service_model}`"


def test_a_model_that_is_not_offered_is_refused_with_the_setting_that_names_one(
    service_url: str, service_model: Path
) -> None:
    check_service(config(service_url, f"service.model={service_model}"))
    with pytest.raises(UserError) as refused:
        check_service(config(service_url))
    assert refused.value.message == "the service does not offer the model `warmstart`"
    assert refused.value.hint == f'add `service.model="{service_model}"`'


def test_a_later_sdk_is_refused_with_the_command_that_installs_one_it_reads(
    service_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightningrl.cli.hosted_checks.version_of", lambda package: "0.38.0")
    found = {check.name: check for check in service_checks(config(service_url))}
    assert found["format"].ok is False and found["format"].hint == '`pip install "tinker==0.24.1"`'
    assert found["format"].found == "the service only reads JSON, and the package `tinker` 0.38.0 writes protobuf"


async def test_frozen_policies_answer_without_an_adapter_or_with_that_of_a_run(
    service_url: str, service_model: Path, tmp_path: Path
) -> None:
    service = Service(config(service_url).service)
    policy = RemotePolicy(service, base=str(service_model), rank=4, seed=0, near=NEAR)
    write_saved(tmp_path / "run", policy.describe(state=policy.save_state(), sampler=policy.save_sampler()))
    run = config(
        service_url,
        f'model.path="{service_model}"',
        f'routes=[{{model = "a", policy = "frozen"}}, {{policy = "frozen", weights = "{tmp_path / "run"}"}}]',
    )
    folders = {str(service_model): service_model, str(tmp_path / "run"): tmp_path / "run"}
    template = ChatTemplate.load(service_model)
    engines = make_engines(run, folders, template=template, models={"policy": policy})
    answers: dict[str, tuple[int, ...]] = {}
    for name in ("frozen", f"frozen:{tmp_path / 'run'}"):
        sampling = Sampling(max_tokens=8, temperature=0.0)
        deltas = [delta async for delta in engines[name].generate(ASKED, sampling=sampling, policy=name)]
        answers[name] = deltas[-1].token_ids
        assert deltas[-1].policy_version == 0 and len(deltas[-1].token_ids) == len(deltas[-1].logprobs) > 0
    assert len(set(answers.values())) == 1, "an adapter that was never updated changes nothing"
    for engine in engines.values():
        await engine.close()
