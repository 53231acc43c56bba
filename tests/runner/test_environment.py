"""An agent's environment: every SDK finds the gateway, and no other server."""

import os
import tomllib
from pathlib import Path

import anthropic
import openai
import pytest
from google import genai
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.util.re import parse_env_headers

from lightningrl.config import AgentConfig
from lightningrl.runner.conformance import attempt
from lightningrl.runner.environment import (
    COLLECTORS,
    EVERYTHING,
    QUIET,
    addresses,
    environment_page,
    make_codex_home,
    process_environment,
    telemetry,
)
from lightningrl.runner.pool import WorkerPool

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
GATEWAY = "http://127.0.0.1:8000"
HEADERS = "OTEL_EXPORTER_OTLP_TRACES_HEADERS"


def test_every_sdk_finds_the_gateway_and_the_key_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "a person's own")
    for name in ("ANTHROPIC_AUTH_TOKEN", "GOOGLE_API_KEY", *addresses(GATEWAY, key="k")):
        monkeypatch.delenv(name, raising=False)
    for name, value in process_environment(GATEWAY, key="secret").items():
        monkeypatch.setenv(name, value)
    ours = openai.OpenAI()
    assert (str(ours.base_url), ours.api_key) == (f"{GATEWAY}/v1/", "secret")
    claude = anthropic.Anthropic()
    assert (str(claude.base_url).rstrip("/"), claude.api_key, claude.auth_token) == (GATEWAY, "secret", None)
    google = genai.Client()
    assert not caplog.records, "the SDK warns of two keys"
    options = google._api_client._http_options
    assert (
        (options.base_url or "").rstrip("/") == GATEWAY
        and google._api_client.api_key == "secret"
        and not google.vertexai
    )


def test_variables_that_lead_past_the_gateway_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "a person's own")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "a person's own")
    monkeypatch.setenv("GOOGLE_API_KEY", "a person's own")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "intern, 127.0.0.1")
    monkeypatch.setenv("FLAVOUR", "mint")
    found = process_environment("http://gateway.intern:8000", key="secret", inherit=EVERYTHING)
    assert "a person's own" not in found.values() and "CLAUDE_CODE_USE_BEDROCK" not in found
    assert found["NO_PROXY"] == found["no_proxy"] == "intern,127.0.0.1,localhost,::1,gateway.intern"
    assert found["FLAVOUR"] == "mint" and found["HTTP_PROXY"] == "http://proxy:3128"


SECRETS = {
    "UPSTREAM_KEY": "sk-upstream",
    "SAME_KEY": "sk-upstream",
    "HF_TOKEN": "hf_secret",
    "AWS_SECRET_ACCESS_KEY": "aws",
    "GITHUB_TOKEN": "ghp_secret",
    "NODE_AUTH_TOKEN": "npm",
    "OTEL_EXPORTER_OTLP_HEADERS": "x-api-key=collector",
    "DATABASE_URL": "postgres://user:password@host/db",
}


def test_secrets_are_not_inherited_but_useful_variables_are(monkeypatch: pytest.MonkeyPatch) -> None:
    useful = {
        "LC_ALL": "C.UTF-8",
        "NODE_PATH": "/node",
        "https_proxy": "http://proxy:3128",
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTHONPATH": "/python",
    }
    for name, value in {**SECRETS, **useful}.items():
        monkeypatch.setenv(name, value)
    found = process_environment(GATEWAY, secrets=["UPSTREAM_KEY"])
    assert not SECRETS.keys() & found.keys()
    assert useful.items() <= found.items() and {"PATH", "HOME"} <= found.keys()


def test_a_recipe_may_ask_for_more_but_never_for_the_key_of_an_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    found = process_environment(GATEWAY, inherit=["HF_TOKEN", "AWS_*"], secrets=["UPSTREAM_KEY"])
    assert SECRETS.keys() & found.keys() == {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"}
    everything = process_environment(GATEWAY, inherit=EVERYTHING, secrets=["UPSTREAM_KEY"])
    assert SECRETS.keys() - everything.keys() == {"UPSTREAM_KEY", "SAME_KEY"}, (
        "the same value under another name is the same key"
    )


async def test_neither_functions_nor_programs_find_a_secret_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "agent.py").write_text(
        "import os\ndef run(task):\n    return dict(os.environ)\ndef reward(task, output):\n    return 1\n"
    )
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    for how in ({"entry": "agent:run"}, {"command": ["python", "-c", program]}):
        agent = AgentConfig.model_validate(
            {**how, "reward": "agent:reward", "workers": 1, "inherit_env": ["GITHUB_*", "S*_KEY"]}
        )
        runner = WorkerPool(agent, root=tmp_path, secrets=["UPSTREAM_KEY"])
        await runner.start()
        try:
            seen = (await runner.run(*attempt({}))).output
        finally:
            await runner.close()
        assert SECRETS.keys() & seen.keys() == {"GITHUB_TOKEN"}, how


def test_azure_variables_are_set_only_where_azure_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_OPENAI_ENDPOINT", raising=False)
    assert "AZURE_OPENAI_ENDPOINT" not in process_environment(GATEWAY)
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "https://mine.example")
    assert process_environment(GATEWAY, key="k")["AZURE_OPENAI_ENDPOINT"] == GATEWAY


def test_a_recipe_overrides_everything_but_the_address() -> None:
    found = process_environment(GATEWAY, wishes={"DO_NOT_TRACK": "0", "OPENAI_BASE_URL": "https://elsewhere", "X": "y"})
    assert found["DO_NOT_TRACK"] == "0" and found["X"] == "y" and found["OPENAI_BASE_URL"] == f"{GATEWAY}/v1"
    assert QUIET.keys() <= found.keys()


def test_spans_go_to_the_gateway_with_the_key_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COLLECTORS, HEADERS):
        monkeypatch.delenv(name, raising=False)
    for name, value in process_environment(GATEWAY, key="lrl-secret").items():
        monkeypatch.setenv(name, value)
    exporter = OTLPSpanExporter()
    assert exporter._endpoint == f"{GATEWAY}/v1/traces" and parse_env_headers(os.environ[HEADERS]) == {
        "x-api-key": "lrl-secret"
    }
    exporter.shutdown()
    shared = process_environment(GATEWAY)
    assert shared["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == f"{GATEWAY}/v1/traces"
    program = telemetry(GATEWAY, key="lrl-secret", environment=shared)
    assert program[HEADERS] == "x-api-key=lrl-secret", "a worker adds it for a program"


@pytest.mark.parametrize("name", COLLECTORS)
def test_another_collector_is_kept_and_does_not_get_the_key(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in (*COLLECTORS, HEADERS):
        monkeypatch.delenv(other, raising=False)
    mine = process_environment(GATEWAY, key="lrl-secret", wishes={name: "https://mine.example"})
    assert mine[name] == "https://mine.example"
    assert not any("lrl-secret" in value for key, value in mine.items() if key.startswith("OTEL_"))
    monkeypatch.setenv(name, "https://mine.example")
    assert telemetry(GATEWAY, key="lrl-secret", environment=process_environment(GATEWAY)) == {}


def test_codex_gets_a_provider_for_the_gateway(tmp_path: Path) -> None:
    home = make_codex_home(tmp_path / "codex", gateway=GATEWAY)
    config = tomllib.loads((home / "config.toml").read_text())
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == f"{GATEWAY}/v1" and provider["wire_api"] == "responses"
    assert provider["env_key"] in addresses(GATEWAY, key="k") and config["analytics"] == {"enabled": False}
    assert config["features"] == {"plugins": False}, "or each run fetches their catalogue"
    assert process_environment(GATEWAY, codex_home=home)["CODEX_HOME"] == str(home)


def test_openhands_finds_the_gateway_and_a_model_that_a_recipe_may_change() -> None:
    found = process_environment(GATEWAY, key="secret")
    assert (found["LLM_BASE_URL"], found["LLM_API_KEY"], found["LLM_MODEL"]) == (
        f"{GATEWAY}/v1",
        "secret",
        "openai/policy",
    )
    assert process_environment(GATEWAY, wishes={"LLM_MODEL": "openai/coder"})["LLM_MODEL"] == "openai/coder"


def test_the_docs_have_the_tables_of_the_environment() -> None:
    assert environment_page() in PAGE.read_text(), (
        "python -c 'from lightningrl.runner.environment import *; print(environment_page())'"
    )
