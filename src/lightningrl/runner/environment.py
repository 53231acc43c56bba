"""Which environment does an agent get? What it needs of ours, no secrets; where its model is; and no telemetry to
vendors.

All attempts share the addresses; the keys are the attempt's token, or a placeholder where many attempts share a process
(see `attach`).
"""

import fnmatch
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import tomli_w

PLACEHOLDER_KEY = "lightningrl"
"""SDKs want a key at construction, also where many attempts share a client; who calls is then in the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One line of the table in docs/gateway.md."""

    name: str
    value: str
    """`{gateway}` stands for the gateway's URL, `{key}` for the attempt's token, `{codex}` for a folder that is made
    for the run.
    """
    readers: str
    """Who looks at it, or what it is for."""


INHERITED = {
    "person and place": "HOME USER LOGNAME HOSTNAME TMPDIR TMP TEMP LANG LANGUAGE LC_* TZ CI",
    "programs": "PATH SHELL EDITOR PAGER LD_LIBRARY_PATH LD_PRELOAD DYLD_* DOCKER_HOST",
    "terminal and screen": "TERM COLORTERM NO_COLOR FORCE_COLOR COLUMNS LINES DISPLAY WAYLAND_DISPLAY XAUTHORITY XDG_* DBUS_SESSION_BUS_ADDRESS",
    "Python": "PYTHON* VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_EXE PYENV_ROOT PIP_CACHE_DIR UV_CACHE_DIR UV_PYTHON",
    "Node": "NODE_PATH NODE_OPTIONS NODE_ENV NODE_EXTRA_CA_CERTS NODE_NO_WARNINGS NVM_DIR NVM_BIN VOLTA_HOME PNPM_HOME BUN_INSTALL DENO_DIR"
    " NPM_CONFIG_PREFIX NPM_CONFIG_CACHE npm_config_prefix npm_config_cache",
    "other languages": "JAVA_HOME GOPATH GOROOT GOCACHE GOMODCACHE CARGO_HOME RUSTUP_HOME DOTNET_ROOT GEM_HOME GEM_PATH PERL5LIB JULIA_DEPOT_PATH",
    "network": "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy"
    " SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE",
    "processors": "CUDA_* NVIDIA_* ROCR_* HIP_* OMP_* KMP_* MKL_* OPENBLAS_* NUMEXPR_* MALLOC_* TOKENIZERS_PARALLELISM",
    "models and data": "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE"
    " TORCH_HOME SENTENCE_TRANSFORMERS_HOME NLTK_DATA TIKTOKEN_CACHE_DIR",
    "browsers": "PLAYWRIGHT_* PUPPETEER_* CHROME_BIN CHROME_PATH",
    "names of models": "OPENAI_MODEL ANTHROPIC_MODEL ANTHROPIC_SMALL_FAST_MODEL GEMINI_MODEL"
    " AZURE_OPENAI_ENDPOINT AZURE_OPENAI_API_VERSION OPENAI_API_VERSION OPENAI_API_TYPE",
    "OpenTelemetry": "OTEL_SDK_DISABLED OTEL_SERVICE_NAME OTEL_RESOURCE_ATTRIBUTES OTEL_PROPAGATORS OTEL_TRACES_* OTEL_METRICS_* OTEL_LOGS_*"
    " OTEL_BSP_* OTEL_PYTHON_* OTEL_EXPORTER_OTLP_ENDPOINT OTEL_EXPORTER_OTLP_PROTOCOL"
    " OTEL_EXPORTER_OTLP_TRACES_ENDPOINT OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
}
"""What it is for → the variables of ours that agents get; `*` stands for any characters. None of them is meant for a
secret.
"""
EVERYTHING = ("*",)

ADDRESSES = (
    Variable(name="OPENAI_BASE_URL", value="{gateway}/v1", readers="OpenAI SDKs and what is built on them"),
    Variable(name="OPENAI_API_BASE", value="{gateway}/v1", readers="LangChain, LiteLLM: the older name"),
    Variable(
        name="ANTHROPIC_BASE_URL", value="{gateway}", readers="Anthropic SDKs, Claude Code; they add `/v1` themselves"
    ),
    Variable(name="ANTHROPIC_API_BASE", value="{gateway}", readers="LiteLLM"),
    Variable(name="GEMINI_API_BASE", value="{gateway}", readers="LiteLLM"),
    Variable(name="GOOGLE_GEMINI_BASE_URL", value="{gateway}", readers="Google GenAI SDKs, Gemini CLI"),
    Variable(name="LLM_BASE_URL", value="{gateway}/v1", readers="OpenHands"),
)
KEYS = (
    Variable(name="OPENAI_API_KEY", value="{key}", readers="OpenAI SDKs, Codex through its config.toml"),
    Variable(name="ANTHROPIC_API_KEY", value="{key}", readers="Anthropic SDKs, Claude Code"),
    Variable(name="GEMINI_API_KEY", value="{key}", readers="Google GenAI SDKs, Gemini CLI, LiteLLM"),
    Variable(name="GOOGLE_GENERATIVE_AI_API_KEY", value="{key}", readers="AI SDK of Vercel"),
    Variable(name="LLM_API_KEY", value="{key}", readers="OpenHands"),
)
MODELS = (
    Variable(
        name="LLM_MODEL",
        value="openai/policy",
        readers="OpenHands: LiteLLM's name for `policy` behind the URL; `agent.env` may name another",
    ),
)
PLACES = (
    Variable(
        name="CODEX_HOME",
        value="{codex}",
        readers="Codex; holds a config.toml that names the gateway, as Codex ignores `OPENAI_BASE_URL`",
    ),
    Variable(
        name="NO_PROXY",
        value="127.0.0.1,localhost,…",
        readers="everybody; added to what is there, so that a proxy does not swallow the calls",
    ),
    Variable(name="no_proxy", value="127.0.0.1,localhost,…", readers="those who read only the lower case"),
)
AZURE = (
    Variable(
        name="AZURE_OPENAI_ENDPOINT", value="{gateway}", readers="OpenAI SDK with Azure; only where it was set before"
    ),
    Variable(
        name="AZURE_OPENAI_API_KEY",
        value="{key}",
        readers="OpenAI SDK with Azure; only where the endpoint was set before",
    ),
)
"""Unasked, they would do harm: with them, the client that OpenAI's module makes by itself cannot tell whose it is."""
TELEMETRY = (
    Variable(
        name="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        value="{gateway}/v1/traces",
        readers="OpenTelemetry SDKs, unless another collector is named",
    ),
    Variable(
        name="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        value="http/protobuf",
        readers="OpenTelemetry SDKs, with the endpoint",
    ),
    Variable(
        name="OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        value="x-api-key={key}",
        readers="OpenTelemetry SDKs of programs, with the endpoint",
    ),
)
"""Where spans go (see docs/air.md). Whoever has a collector of their own keeps it."""
COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""What names one."""
QUIET = (
    Variable(name="DO_NOT_TRACK", value="1", readers="many tools"),
    Variable(name="ANONYMIZED_TELEMETRY", value="false", readers="Chroma, browser-use"),
    Variable(name="DISABLE_TELEMETRY", value="1", readers="Claude Code, Open Interpreter"),
    Variable(name="NO_UPDATE_NOTIFIER", value="1", readers="npm tools"),
    Variable(name="LANGSMITH_TRACING", value="false", readers="LangChain, LangGraph"),
    Variable(name="LANGSMITH_TRACING_V2", value="false", readers="LangChain, LangGraph"),
    Variable(name="LANGCHAIN_TRACING_V2", value="false", readers="LangChain, LangGraph"),
    Variable(name="OPENAI_AGENTS_DISABLE_TRACING", value="1", readers="OpenAI Agents SDK"),
    Variable(name="LITELLM_LOCAL_MODEL_COST_MAP", value="True", readers="LiteLLM: does not fetch its price list"),
    Variable(name="CREWAI_DISABLE_TELEMETRY", value="true", readers="CrewAI"),
    Variable(name="CREWAI_DISABLE_TRACKING", value="true", readers="CrewAI"),
    Variable(name="CREWAI_TRACING_ENABLED", value="false", readers="CrewAI"),
    Variable(
        name="CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", value="1", readers="Claude Code: updates, surveys, reports"
    ),
    Variable(name="DISABLE_AUTOUPDATER", value="1", readers="Claude Code"),
    Variable(name="DISABLE_ERROR_REPORTING", value="1", readers="Claude Code"),
    Variable(name="GEMINI_TELEMETRY_ENABLED", value="false", readers="Gemini CLI"),
    Variable(name="OPENCODE_DISABLE_AUTOUPDATE", value="1", readers="OpenCode"),
    Variable(name="AGNO_TELEMETRY", value="false", readers="Agno"),
    Variable(name="HAYSTACK_TELEMETRY_ENABLED", value="False", readers="Haystack"),
    Variable(name="MASTRA_TELEMETRY_DISABLED", value="1", readers="Mastra"),
    Variable(name="MEM0_TELEMETRY", value="false", readers="Mem0"),
    Variable(name="HF_HUB_DISABLE_TELEMETRY", value="1", readers="Hugging Face libraries"),
    Variable(name="GRADIO_ANALYTICS_ENABLED", value="False", readers="Gradio"),
)
"""Thousands of rollouts are not to be reported to anybody. OTEL_SDK_DISABLED is not among them: an agent's own spans
are welcome.
"""

TAKEN_AWAY = (
    Variable(name="ANTHROPIC_AUTH_TOKEN", value="", readers="Anthropic SDKs, Claude Code: goes before the key"),
    Variable(name="CLAUDE_CODE_OAUTH_TOKEN", value="", readers="Claude Code: a subscription"),
    Variable(name="CLAUDE_CODE_USE_BEDROCK", value="", readers="Claude Code: another provider"),
    Variable(name="CLAUDE_CODE_USE_VERTEX", value="", readers="Claude Code: another provider"),
    Variable(name="CLAUDE_CODE_USE_FOUNDRY", value="", readers="Claude Code: another provider"),
    Variable(name="GOOGLE_GENAI_USE_VERTEXAI", value="", readers="Google GenAI SDKs, Gemini CLI: another provider"),
    Variable(name="GOOGLE_API_KEY", value="", readers="Google GenAI SDKs: goes before GEMINI_API_KEY, with a warning"),
    Variable(name="AZURE_OPENAI_AD_TOKEN", value="", readers="OpenAI SDK with Azure: goes before the key"),
)
"""Variables of a person's shell that would lead an agent past the gateway, to a model that costs money. Not inherited,
even if the recipe asks.
"""


def addresses(gateway: str, *, key: str) -> dict[str, str]:
    """Where the model is, and the key to it: what an attempt gets. `gateway` has no `/v1`."""
    return _filled((*ADDRESSES, *KEYS), gateway, key)


def telemetry(gateway: str, *, key: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Where spans go, in an `environment` that names no other collector. Attempts that share a process share its
    exporter, which has no key then.
    """
    found = _filled(TELEMETRY if key != PLACEHOLDER_KEY else TELEMETRY[:2], gateway, key)
    ours = found["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
    return found if all(environment.get(name, ours) in (ours, "") for name in COLLECTORS) else {}


def process_environment(
    gateway: str | None,
    *,
    key: str = PLACEHOLDER_KEY,
    inherit: Iterable[str] = (),
    secrets: Collection[str] = (),
    wishes: Mapping[str, str] | None = None,
    codex_home: Path | None = None,
) -> dict[str, str]:
    """The whole environment of a process that runs agents: what it inherits, quietened; then `wishes`; then where the
    model is.

    `inherit`, a recipe's `agent.inherit_env`, names variables beside the usual ones. `secrets` are the variables with
    the keys of upstreams: they are never inherited, nor is any other variable with the same value. `wishes`, a recipe's
    `agent.env`, have the last word on everything but the model's address. `gateway` is None where it is not known yet.
    """
    environment = _inherited(os.environ, patterns=[*" ".join(INHERITED.values()).split(), *inherit], secrets=secrets)
    environment |= {variable.name: variable.value for variable in (*MODELS, *QUIET)}
    if codex_home is not None:
        environment["CODEX_HOME"] = str(codex_home.resolve())
    environment |= wishes or {}
    if gateway is None:
        return environment | {variable.name: key for variable in KEYS}
    proxied = _without_proxy(environment, host=urlsplit(gateway).hostname or "")
    azure = AZURE if "AZURE_OPENAI_ENDPOINT" in environment else ()
    spans = telemetry(gateway, key=key, environment=environment)
    return (
        environment
        | {"NO_PROXY": proxied, "no_proxy": proxied}
        | _filled(azure, gateway, key)
        | spans
        | addresses(gateway, key=key)
    )


def make_codex_home(folder: Path, *, gateway: str) -> Path:
    """Write the config.toml that leads Codex to the gateway; `folder` is made if it is not there. Keys as Codex 0.169
    knows them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    provider = {
        "name": "LightningRL",
        "base_url": f"{gateway.rstrip('/')}/v1",
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
        "supports_websockets": False,
    }
    config = {
        "model": "policy",
        "model_provider": "lightningrl",
        "check_for_update_on_startup": False,
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "features": {"plugins": False},  # their catalogue is fetched in every run
        "model_providers": {"lightningrl": provider},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    return folder


def environment_page() -> str:
    """The tables of docs/gateway.md."""
    inherited = [
        f"| {purpose} | {' '.join(f'`{name}`' for name in names.split())} |" for purpose, names in INHERITED.items()
    ]
    sets = [*ADDRESSES, *KEYS, *MODELS, *TELEMETRY, *AZURE, *PLACES, *QUIET]
    first = "\n".join(["| inherited for | variables |", "|---|---|", *inherited])
    return f"{first}\n\n{_table(sets, head='value')}\n\n{_table(TAKEN_AWAY, head=None)}\n"


def _inherited(environment: Mapping[str, str], *, patterns: Iterable[str], secrets: Collection[str]) -> dict[str, str]:
    wanted = re.compile("|".join(map(fnmatch.translate, patterns)))
    withheld = {*secrets, *(variable.name for variable in TAKEN_AWAY)}
    keys = {environment[name] for name in secrets if environment.get(name)}
    return {
        name: value
        for name, value in environment.items()
        if name not in withheld and value not in keys and wanted.match(name)
    }


def _filled(variables: Iterable[Variable], gateway: str, key: str) -> dict[str, str]:
    return {variable.name: variable.value.format(gateway=gateway.rstrip("/"), key=key) for variable in variables}


def _table(variables: Iterable[Variable], *, head: str | None) -> str:
    rows = [
        "| variable | value | who reads it |" if head else "| taken away | who reads it |",
        "|---|---|---|" if head else "|---|---|",
    ]
    for variable in variables:
        value = f" `{variable.value.translate(str.maketrans('{}', '<>'))}` |" if head else ""
        rows.append(f"| `{variable.name}` |{value} {variable.readers} |")
    return "\n".join(rows)


def _without_proxy(environment: Mapping[str, str], *, host: str) -> str:
    """The hosts that are reached directly, the gateway's among them."""
    known = [name.strip() for key in ("NO_PROXY", "no_proxy") for name in environment.get(key, "").split(",")]
    return ",".join(dict.fromkeys(name for name in [*known, "127.0.0.1", "localhost", "::1", host] if name))
