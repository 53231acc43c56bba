"""What a user of a hosted backend is told before a run. The services here only know the requests of the checks; those
of `tests_tinker` are real.
"""

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import lightningrl.hosted.service
from lightningrl.cli.check import Check
from lightningrl.cli.hosted_checks import FORMATS, NOBODY, check_learnable, format_check, package_check, service_checks
from lightningrl.config import Config
from lightningrl.engines import check_weights, kept_at_service
from lightningrl.errors import UserError
from lightningrl.hosted.kept import Saved, write_saved
from lightningrl.recipe import load_config
from lightningrl.trainer.base import TRAINER
from tests.conftest import SmallRecipe

KEY = "tml-right"
MODELS = [
    {"model_name": "org/large", "max_context_length": 32768},
    {"model_name": "org/short", "max_context_length": 64},
    {"model_name": "org/frozen", "trainable": False},
]


@contextmanager
def service(*, reads: str, health: int = 200) -> Iterator[str]:
    """The address of a service for those with `KEY`, which reads requests of one content type."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/api/v1/healthz":
                self.say(health, {})
            elif self.headers.get("X-API-Key") != KEY:
                self.say(401, {})
            else:
                self.say(200, {"supported_models": MODELS})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            asked = self.path == "/api/v1/forward_backward" and NOBODY.encode() in body
            if self.headers.get("X-API-Key") != KEY:
                self.say(401, {})
            else:
                self.say(404 if asked and self.headers["content-type"] == reads else 422, {})

        def say(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            if status == 307:
                self.send_header("location", "http://elsewhere/")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def hosted(recipe: SmallRecipe, *settings: str) -> Config:
    return load_config(recipe.path, ["backend=tinker", "model.lora_rank=8", *settings])


def found(config: Config, *, timeout_s: float = 10.0) -> Mapping[str, Check]:
    return {check.name: check for check in service_checks(config, timeout_s=timeout_s) if check.name != "tinker"}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        (["model.lora_rank=0"], "a service trains adapters, but `model.lora_rank` is `0`", "set `model.lora_rank=16`"),
        (["algorithm.credit=gae_calls"], "`algorithm.credit` is `gae_calls`", "`fork`, `gigpo`"),
        (["loss.entropy_coef=0.01"], "`loss.entropy_coef` needs the whole distribution", "`ppo_clip`, `cispo` and"),
        (["policies.a.loss.entropy_coef=0.01"], "`policies.a.loss.entropy_coef`", "set `policies.a.loss.entropy_coef="),
    ],
)
def test_what_a_service_cannot_compute_is_refused_with_what_it_can(
    settings: list[str], message: str, hint: str, small_recipe: SmallRecipe
) -> None:
    if "policies" in settings[0]:
        settings = [*settings, 'routes=[{policy = "a"}]']
    with pytest.raises(UserError) as refused:
        check_learnable(hosted(small_recipe, *settings))
    assert message in refused.value.message and hint in (refused.value.hint or "")


@pytest.mark.parametrize("loss", ["name=ppo_clip", "name=cispo", "name=pg", "ratio=rollout", "kl_coef=0.1"])
def test_every_loss_of_log_probabilities_is_accepted(loss: str, small_recipe: SmallRecipe) -> None:
    check_learnable(hosted(small_recipe, f"loss.{loss}"))


def test_the_adapter_of_a_run_needs_no_rank_and_is_known_by_the_model_below_it(small_recipe: SmallRecipe) -> None:
    saved = Saved(base="org/large", rank=4, state="tinker://a", sampler="tinker://b", steps=1)
    write_saved(small_recipe.folder / "run" / "model", saved)
    with service(reads="application/json") as url:
        config = hosted(small_recipe, "model.path=run/model", "model.lora_rank=0", f"service.url={url}")
        check_learnable(config)
        assert found(config)["model"].found == "`org/large` is offered, with contexts of up to 32,768 tokens"


def test_a_refused_recipe_exits_with_2_before_anything_is_asked_and_leaves_no_run(small_recipe: SmallRecipe) -> None:
    with silent() as url:
        done = small_recipe.cli("train", "recipe.toml", "backend=tinker", f"service.url={url}", "--run-dir", "r")
    assert done.returncode == 2 and "`model.lora_rank` is `0`" in done.stderr
    assert not (small_recipe.folder / "r").exists()


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_run_that_cannot_reach_its_service_exits_with_2(command: str, small_recipe: SmallRecipe) -> None:
    began = time.monotonic()
    settings = ("backend=tinker", "model.lora_rank=8", f"service.url=http://127.0.0.1:{closed_port()}")
    done = small_recipe.cli(command, "recipe.toml", *settings)
    assert done.returncode == 2 and time.monotonic() - began < 60, "the SDK alone would try for minutes"
    sdk_missing = "the package `tinker` is not installed" in done.stderr
    assert sdk_missing or "cannot be reached: Connection refused" in done.stderr


@pytest.mark.parametrize(
    ("version", "ok", "hint"),
    [
        (None, False, "lightningrl[tinker]"),
        ("0.9.2", False, "tinker>=0.24.1"),
        ("0.24.1", True, ""),
        ("0.38.0", True, ""),
    ],
)
def test_the_package_is_named_with_the_command_that_installs_it(version: str | None, ok: bool, hint: str) -> None:
    check = package_check(version)
    assert check.ok is ok and hint in check.hint


@pytest.mark.parametrize(
    ("version", "json_status", "protobuf_status", "ok"),
    [
        ("0.24.1", 404, 422, True),
        ("0.24.1", 422, 404, True),  # it asks the service which of both to write
        ("0.25.0", 404, 422, False),
        ("0.38.0", 404, 500, False),
        ("0.38.0", 404, 404, True),
        ("0.38.0", 415, 404, True),
        ("0.38.0", 400, 400, None),
        (None, 404, 422, False),
    ],
)
def test_an_sdk_that_the_service_cannot_read_is_named_with_one_that_it_can(
    version: str | None, json_status: int, protobuf_status: int, ok: bool | None
) -> None:
    check = format_check(version, {"JSON": json_status, "protobuf": protobuf_status})
    assert check.ok is ok
    assert check.hint == ('`pip install "tinker==0.24.1"`' if ok is False else "")


def test_a_service_is_asked_in_both_formats(small_recipe: SmallRecipe) -> None:
    for name, (content_type, _) in FORMATS.items():
        with service(reads=content_type) as url:
            config = hosted(small_recipe, f"service.url={url}", "service.model=org/large")
            assert name in found(config)["format"].found


def test_models_are_matched_with_what_is_offered_for_training(small_recipe: SmallRecipe) -> None:
    with service(reads="application/json") as url:

        def model(name: str, *more: str) -> Check:
            return found(hosted(small_recipe, f"service.url={url}", f"service.model={name}", *more))["model"]

        assert model("org/large").ok
        missing = model("org/larg")
        assert missing.found == "the service does not offer the model `org/larg`" and not missing.ok
        assert missing.hint == "set `service.model`: did you mean `org/large`? known: `org/large`, `org/short`"
        assert not model("org/frozen").ok, "it is offered for sampling alone"
        short = model("org/short", "engine.max_length=128")
        assert not short.ok and short.hint == "set `engine.max_length=64`"
        assert model("org/short", "engine.max_length=64").ok


def test_without_a_recipe_the_models_are_listed(small_recipe: SmallRecipe) -> None:
    with service(reads="application/json") as url:
        done = small_recipe.cli("doctor", "--backend", "tinker", f"service.url={url}", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["models"]["found"] == "offered: `org/large`, `org/short`"
    assert not {"recipe", "model", "gpu", "fits", "vllm"} & set(checks), "nothing is computed here"


def test_doctor_also_judges_the_recipe(small_recipe: SmallRecipe) -> None:
    done = small_recipe.cli("doctor", "recipe.toml", "backend=tinker", "service.url=http://127.0.0.1:1", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 1 and checks["recipe"]["hint"] == "set `model.lora_rank=16`"
    assert checks["address"]["found"] == "`http://127.0.0.1:1` cannot be reached: Connection refused"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "`TINKER_API_KEY` is not set"),
        ("sk-other", "`TINKER_API_KEY` is no key"),
        ("tml-…", "`TINKER_API_KEY` is no key"),
        ("tml-wrong", "the service refuses the key in `TINKER_API_KEY`"),
    ],
)
def test_a_key_is_missing_malformed_or_refused(
    value: str, message: str, small_recipe: SmallRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", value)
    with service(reads="application/json") as url:
        checks = found(hosted(small_recipe, f"service.url={url}"))
    assert checks["key"].ok is False and message in checks["key"].found and "TINKER_API_KEY" in checks["key"].hint
    assert checks["address"].ok and "model" not in checks


def test_an_address_is_closed_silent_elsewhere_or_no_address(small_recipe: SmallRecipe) -> None:
    def said(url: str) -> str:
        check = found(hosted(small_recipe, f"service.url={url}"), timeout_s=0.5)["address"]
        assert check.ok is False and check.hint
        return check.found

    assert "cannot be reached: Connection refused" in said(f"http://127.0.0.1:{closed_port()}")
    assert "is no address" in said("127.0.0.1:8000")
    with silent() as url:
        assert said(url) == f"`{url}` does not answer within `0.5` s"
    with service(reads="", health=404) as url:
        assert "does not speak the Tinker API" in said(url)
    with service(reads="", health=503) as url:
        assert said(url).endswith("is not healthy: it answers `503`")
    with service(reads="", health=307) as url:
        assert said(url) == f"`{url}` leads to `http://elsewhere/`"


def test_without_a_url_the_service_is_that_of_the_environment_or_of_thinking_machines(
    small_recipe: SmallRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = f"http://127.0.0.1:{closed_port()}"
    monkeypatch.setenv("TINKER_BASE_URL", nowhere)
    assert nowhere in found(hosted(small_recipe))["address"].found
    monkeypatch.delenv("TINKER_BASE_URL")
    monkeypatch.setattr(lightningrl.hosted.service, "ADDRESS", f"{nowhere}/home")  # the tests ask nobody else's service
    assert f"{nowhere}/home" in found(hosted(small_recipe))["address"].found


@contextmanager
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_weights_that_the_backend_cannot_answer_from_are_refused(tmp_path: Path) -> None:
    kept, local = tmp_path / "step-00001", tmp_path / "model"
    write_saved(kept, Saved(base="org/large", rank=8, state="", sampler="tinker://run/step", steps=1))
    local.mkdir()
    (local / "config.json").touch()
    check_weights(kept, backend="tinker")
    check_weights(local, backend="local")
    with pytest.raises(UserError, match="the service keeps nothing"):
        check_weights(local, backend="tinker")
    with pytest.raises(UserError, match="its weights are at a service"):
        check_weights(kept, backend="local")
    with pytest.raises(UserError, match="was not finished"):
        kept_at_service(kept)
    write_saved(kept / TRAINER, Saved(base="org/large", rank=8, state="tinker://run/state", sampler="", steps=1))
    found = kept_at_service(kept)
    assert found is not None and found.state == "tinker://run/state"


def test_a_folder_without_a_record_is_a_name_like_any_other(small_recipe: SmallRecipe) -> None:
    with service(reads="application/json") as url:
        check = found(hosted(small_recipe, f"service.url={url}", "model.path=model"))["model"]
    assert check.found == "the service does not offer the model `model`"
