"""The environment of an agent: its model's address, variables of ours that hold no secret, no telemetry to vendors.

All attempts share the addresses. The keys are the attempt's token, or a placeholder where attempts share a process (see
`attach`).
"""

import fnmatch
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import tomli_w

PLACEHOLDER_KEY = "lightningrl"
"""SDKs want a key at construction, even for a client that many attempts share. A header then carries the token."""

Variables: TypeAlias = dict[str, tuple[str, str]]
"""Name → (value, its readers): rows of a table in docs/gateway.md.

In a value, `{gateway}` stands for the gateway's URL and `{key}` for the attempt's token.
"""

INHERITED = {
    "person and place": "HOME USER LOGNAME HOSTNAME TMPDIR TMP TEMP LANG LANGUAGE LC_* TZ CI",
    "programs": "PATH SHELL EDITOR PAGER LD_LIBRARY_PATH LD_PRELOAD DYLD_* DOCKER_HOST",
    "terminal and screen": "TERM COLORTERM NO_COLOR FORCE_COLOR COLUMNS LINES DISPLAY WAYLAND_DISPLAY XAUTHORITY XDG_*"
    " DBUS_SESSION_BUS_ADDRESS",
    "Python": "PYTHON* VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_EXE PYENV_ROOT PIP_CACHE_DIR UV_CACHE_DIR"
    " UV_PYTHON",
    "Node": "NODE_PATH NODE_OPTIONS NODE_ENV NODE_EXTRA_CA_CERTS NODE_NO_WARNINGS NVM_DIR NVM_BIN VOLTA_HOME PNPM_HOME"
    " BUN_INSTALL DENO_DIR NPM_CONFIG_PREFIX NPM_CONFIG_CACHE npm_config_prefix npm_config_cache",
    "other languages": "JAVA_HOME GOPATH GOROOT GOCACHE GOMODCACHE CARGO_HOME RUSTUP_HOME DOTNET_ROOT GEM_HOME GEM_PATH"
    " PERL5LIB JULIA_DEPOT_PATH",
    "network": "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy"
    " SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE",
    "processors": "CUDA_* NVIDIA_* ROCR_* HIP_* OMP_* KMP_* MKL_* OPENBLAS_* NUMEXPR_* MALLOC_* TOKENIZERS_PARALLELISM",
    "models and data": "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_CACHE HF_DATASETS_OFFLINE"
    " TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE TORCH_HOME SENTENCE_TRANSFORMERS_HOME NLTK_DATA TIKTOKEN_CACHE_DIR",
    "browsers": "PLAYWRIGHT_* PUPPETEER_* CHROME_BIN CHROME_PATH",
    "names of models": "OPENAI_MODEL ANTHROPIC_MODEL ANTHROPIC_SMALL_FAST_MODEL GEMINI_MODEL"
    " AZURE_OPENAI_ENDPOINT AZURE_OPENAI_API_VERSION OPENAI_API_VERSION OPENAI_API_TYPE",
    "OpenTelemetry": "OTEL_SDK_DISABLED OTEL_SERVICE_NAME OTEL_RESOURCE_ATTRIBUTES OTEL_PROPAGATORS OTEL_TRACES_*"
    " OTEL_METRICS_* OTEL_LOGS_* OTEL_BSP_* OTEL_PYTHON_* OTEL_EXPORTER_OTLP_ENDPOINT OTEL_EXPORTER_OTLP_PROTOCOL"
    " OTEL_EXPORTER_OTLP_TRACES_ENDPOINT OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
}
"""Purpose → the variables that agents inherit; `*` stands for any characters. None of them is meant for a secret."""
EVERYTHING = ("*",)

ADDRESSES: Variables = {
    "OPENAI_BASE_URL": ("{gateway}/v1", "OpenAI SDKs and libraries built on them"),
    "OPENAI_API_BASE": ("{gateway}/v1", "LangChain, LiteLLM: the older name"),
    "ANTHROPIC_BASE_URL": ("{gateway}", "Anthropic SDKs, Claude Code; they add `/v1` themselves"),
    "ANTHROPIC_API_BASE": ("{gateway}", "LiteLLM"),
    "GEMINI_API_BASE": ("{gateway}", "LiteLLM"),
    "GOOGLE_GEMINI_BASE_URL": ("{gateway}", "Google GenAI SDKs, Gemini CLI"),
    "LLM_BASE_URL": ("{gateway}/v1", "OpenHands"),
}
KEYS: Variables = {
    "OPENAI_API_KEY": ("{key}", "OpenAI SDKs, Codex through its config.toml"),
    "ANTHROPIC_API_KEY": ("{key}", "Anthropic SDKs, Claude Code"),
    "GEMINI_API_KEY": ("{key}", "Google GenAI SDKs, Gemini CLI, LiteLLM"),
    "GOOGLE_GENERATIVE_AI_API_KEY": ("{key}", "AI SDK of Vercel"),
    "LLM_API_KEY": ("{key}", "OpenHands"),
}
MODELS: Variables = {
    "LLM_MODEL": (
        "openai/policy",
        "OpenHands: LiteLLM's name for `policy` behind the URL; `agent.env` may name another",
    ),
}
PLACES: Variables = {
    "CODEX_HOME": ("<codex>", "Codex; holds a config.toml that names the gateway, as Codex ignores `OPENAI_BASE_URL`"),
    "NO_PROXY": (
        "127.0.0.1,localhost,…",
        "every client; added to the existing value, so that a proxy does not swallow the calls",
    ),
    "no_proxy": ("127.0.0.1,localhost,…", "clients that read only the lower case"),
}
AZURE: Variables = {
    "AZURE_OPENAI_ENDPOINT": ("{gateway}", "OpenAI SDK with Azure; only where it was set before"),
    "AZURE_OPENAI_API_KEY": ("{key}", "OpenAI SDK with Azure; only where the endpoint was set before"),
}
"""Only set where the endpoint is set already: else OpenAI's module-level client refuses to choose a vendor."""
TELEMETRY: Variables = {
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": (
        "{gateway}/v1/traces",
        "OpenTelemetry SDKs, unless another collector is named",
    ),
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": ("http/protobuf", "OpenTelemetry SDKs, with the endpoint"),
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": ("x-api-key={key}", "OpenTelemetry SDKs of programs, with the endpoint"),
}
"""Where spans go (see docs/air.md). A collector that the environment already names stays in use."""
COLLECTORS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The variables that name a collector."""
QUIET: Variables = {
    "DO_NOT_TRACK": ("1", "many tools"),
    "ANONYMIZED_TELEMETRY": ("false", "Chroma, browser-use"),
    "DISABLE_TELEMETRY": ("1", "Claude Code, Open Interpreter"),
    "NO_UPDATE_NOTIFIER": ("1", "npm tools"),
    "LANGSMITH_TRACING": ("false", "LangChain, LangGraph"),
    "LANGSMITH_TRACING_V2": ("false", "LangChain, LangGraph"),
    "LANGCHAIN_TRACING_V2": ("false", "LangChain, LangGraph"),
    "OPENAI_AGENTS_DISABLE_TRACING": ("1", "OpenAI Agents SDK"),
    "LITELLM_LOCAL_MODEL_COST_MAP": ("True", "LiteLLM: does not fetch its price list"),
    "CREWAI_DISABLE_TELEMETRY": ("true", "CrewAI"),
    "CREWAI_DISABLE_TRACKING": ("true", "CrewAI"),
    "CREWAI_TRACING_ENABLED": ("false", "CrewAI"),
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": ("1", "Claude Code: updates, surveys, reports"),
    "DISABLE_AUTOUPDATER": ("1", "Claude Code"),
    "DISABLE_ERROR_REPORTING": ("1", "Claude Code"),
    "GEMINI_TELEMETRY_ENABLED": ("false", "Gemini CLI"),
    "OPENCODE_DISABLE_AUTOUPDATE": ("1", "OpenCode"),
    "AGNO_TELEMETRY": ("false", "Agno"),
    "HAYSTACK_TELEMETRY_ENABLED": ("False", "Haystack"),
    "MASTRA_TELEMETRY_DISABLED": ("1", "Mastra"),
    "MEM0_TELEMETRY": ("false", "Mem0"),
    "HF_HUB_DISABLE_TELEMETRY": ("1", "Hugging Face libraries"),
    "GRADIO_ANALYTICS_ENABLED": ("False", "Gradio"),
}
"""Telemetry to vendors, switched off. OTEL_SDK_DISABLED is not among them: an agent's own spans are welcome."""
TAKEN_AWAY = {
    "ANTHROPIC_AUTH_TOKEN": "Anthropic SDKs, Claude Code: takes precedence over the key",
    "CLAUDE_CODE_OAUTH_TOKEN": "Claude Code: a subscription",
    "CLAUDE_CODE_USE_BEDROCK": "Claude Code: another provider",
    "CLAUDE_CODE_USE_VERTEX": "Claude Code: another provider",
    "CLAUDE_CODE_USE_FOUNDRY": "Claude Code: another provider",
    "GOOGLE_GENAI_USE_VERTEXAI": "Google GenAI SDKs, Gemini CLI: another provider",
    "GOOGLE_API_KEY": "Google GenAI SDKs: takes precedence over GEMINI_API_KEY, with a warning",
    "AZURE_OPENAI_AD_TOKEN": "OpenAI SDK with Azure: takes precedence over the key",
}
"""Variables that would lead an agent past the gateway, to a model that costs money. No recipe can inherit them."""


def addresses(gateway: str, *, key: str) -> dict[str, str]:
    """The model's address and key, in the variables of every SDK. `gateway` has no `/v1`."""
    return _filled({**ADDRESSES, **KEYS}, gateway, key)


def telemetry(gateway: str, *, key: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Where spans go; empty if `environment` names another collector.

    Attempts that share a process share its exporter, so there is no key in its headers.
    """
    found = _filled(TELEMETRY, gateway, key)
    if key == PLACEHOLDER_KEY:
        del found["OTEL_EXPORTER_OTLP_TRACES_HEADERS"]
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
    """The whole environment of a process that runs agents.

    In rising precedence: inherited variables, telemetry switched off, `wishes`, the model's address.

    `gateway`: None if it is not known yet.
    `inherit`: the recipe's `agent.inherit_env`, more variables to inherit.
    `secrets`: variables with the keys of upstreams. Neither they nor other variables of the same value are inherited.
    `wishes`: the recipe's `agent.env`.
    """
    environment = _inherited(os.environ, patterns=[*" ".join(INHERITED.values()).split(), *inherit], secrets=secrets)
    environment |= _filled({**MODELS, **QUIET}, "", key)
    if codex_home is not None:
        environment["CODEX_HOME"] = str(codex_home.resolve())
    environment |= wishes or {}
    if gateway is None:
        return environment | dict.fromkeys(KEYS, key)
    proxied = _without_proxy(environment, host=urlsplit(gateway).hostname or "")
    azure = AZURE if "AZURE_OPENAI_ENDPOINT" in environment else {}
    spans = telemetry(gateway, key=key, environment=environment)
    environment |= {"NO_PROXY": proxied, "no_proxy": proxied}
    return environment | _filled(azure, gateway, key) | spans | addresses(gateway, key=key)


def make_codex_home(folder: Path, *, gateway: str) -> Path:
    """Write a config.toml that points Codex at the gateway. Creates `folder`. The keys are those of Codex 0.169."""
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
        "features": {"plugins": False},  # or every run fetches their catalogue
        "model_providers": {"lightningrl": provider},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    return folder


def environment_page() -> str:
    """The tables of docs/gateway.md."""
    inherited = {purpose: " ".join(f"`{name}`" for name in names.split()) for purpose, names in INHERITED.items()}
    given = {
        f"`{name}`": f"`{value.translate(str.maketrans('{}', '<>'))}` | {readers}"
        for name, (value, readers) in (ADDRESSES | KEYS | MODELS | TELEMETRY | AZURE | PLACES | QUIET).items()
    }
    withheld = {f"`{name}`": readers for name, readers in TAKEN_AWAY.items()}
    tables = [
        _table("inherited for | variables", inherited),
        _table("variable | value | read by", given),
        _table("not inherited | read by", withheld),
    ]
    return "\n\n".join(tables) + "\n"


def _table(head: str, rows: Mapping[str, str]) -> str:
    rule = "|---" * (head.count("|") + 1) + "|"
    return "\n".join([f"| {head} |", rule, *(f"| {first} | {rest} |" for first, rest in rows.items())])


def _inherited(environment: Mapping[str, str], *, patterns: Iterable[str], secrets: Collection[str]) -> dict[str, str]:
    wanted = re.compile("|".join(map(fnmatch.translate, patterns)))
    withheld = {*secrets, *TAKEN_AWAY}
    keys = {environment[name] for name in secrets if environment.get(name)}
    return {
        name: value
        for name, value in environment.items()
        if name not in withheld and value not in keys and wanted.match(name)
    }


def _filled(variables: Variables, gateway: str, key: str) -> dict[str, str]:
    return {name: value.format(gateway=gateway.rstrip("/"), key=key) for name, (value, _) in variables.items()}


def _without_proxy(environment: Mapping[str, str], *, host: str) -> str:
    """The hosts that are reached without a proxy, including the gateway's."""
    known = [name.strip() for key in ("NO_PROXY", "no_proxy") for name in environment.get(key, "").split(",")]
    return ",".join(dict.fromkeys(name for name in [*known, "127.0.0.1", "localhost", "::1", host] if name))
