"""Checks of a hosted backend before a run: settings, SDK, address, key, format of the requests, and models.

The service is asked with a short timeout and without its SDK, which retries for minutes. It is asked to train an
adapter that does not exist: the answer says whether it takes the key and can read the request, and costs nothing.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from lightningrl.cli.check import Check
from lightningrl.cli.extras import version_of
from lightningrl.config import Config, LearnerConfig, ServiceConfig
from lightningrl.engines import model_paths
from lightningrl.errors import UserError, meant
from lightningrl.hosted.kept import read_saved
from lightningrl.hosted.service import INSTALL, address_of, name_of
from lightningrl.plugins import names

ASK_S = 10.0
"""Timeout of a request."""
JSON_TOO = "0.24.1"
"""The last SDK that writes JSON as well. Later ones train with protobuf alone; SkyRL 0.3.0 only reads JSON."""
KEYS = ("tml-", "eyJ")
"""How keys begin: the SDK refuses others."""
NOBODY = "00000000-0000-0000-0000-000000000000:train:0"
"""Id of an adapter that no service has."""
FORMATS: Mapping[str, tuple[str, bytes]] = {
    "JSON": (
        "application/json",
        b'{"model_id": "%s", "forward_backward_input": {"data": [], "loss_fn": "cross_entropy"}}' % NOBODY.encode(),
    ),
    "protobuf": (
        "application/x-protobuf",  # field 1: model_id, 2: seq_id, 4: loss_fn
        b"\x0a%c%b\x10\x01\x22\x0dcross_entropy" % (len(NOBODY), NOBODY.encode()),
    ),
}
"""Name → content type and body of a request to train `NOBODY`."""
Offered: TypeAlias = Mapping[str, int | None]
"""Name of each model that can be trained → its longest context in tokens, None if the service does not say."""


def check_service(config: Config) -> None:
    """Raises `UserError` for the first thing that keeps a run from its service."""
    for check in service_checks(config):
        if check.ok is False:
            raise UserError(check.found, hint=check.hint or None)


def check_learnable(config: Config) -> None:
    """Raises `UserError` if a policy needs more than a service can compute."""
    for name, learner in config.learners().items():
        _check_learner(learner, section=f"policies.{name}." if config.policies else "", root=config.root)


def _check_learner(learner: LearnerConfig, *, section: str, root: Path) -> None:
    """Raises `UserError` if a service cannot train this policy. `section`: where its settings are, e.g.
    `policies.NAME.`; `root`: the folder that `model.path` is relative to.
    """
    if learner.model.lora_rank == 0 and read_saved(root / Path(learner.model.path).expanduser()) is None:
        hint = f"set `{section}model.lora_rank=16`"
        raise UserError(f"a service trains adapters, but `{section}model.lora_rank` is `0`", hint=hint)
    if learner.algorithm.credit == "gae_calls":
        known = ", ".join(f"`{name}`" for name in names("credit") if name != "gae_calls")
        message = f"`{section}algorithm.credit` is `gae_calls`, whose critic is a part of the model: a service has none"
        raise UserError(message, hint=f"these work: {known}")
    if learner.loss.entropy_coef:
        message = f"`{section}loss.entropy_coef` needs the whole distribution of each token: a service returns"
        hint = f"set `{section}loss.entropy_coef=0`; `ppo_clip`, `cispo` and `pg` work with all their other settings"
        raise UserError(f"{message} the log-probability of the sampled one", hint=hint)


def recipe_check(config: Config) -> Check:
    """Whether a service can train every policy of the recipe."""
    try:
        check_learnable(config)
    except UserError as error:
        return Check(name="recipe", ok=False, found=error.message, hint=error.hint or "")
    return Check(name="recipe", ok=True, found="a service can train it")


def service_checks(config: Config, *, timeout_s: float = ASK_S) -> Iterator[Check]:
    """Run the checks, up to the first that makes the next ones impossible."""
    service = config.service
    yield package_check(version_of("tinker"))
    key = os.environ.get(service.key_env, "")
    malformed = _key_check(service, key)
    headers = {"X-API-Key": key} if malformed is None else None
    if malformed is not None:
        yield malformed
    address = address_of(service)
    try:
        # Redirects are not followed: the key would go with them.
        client = httpx.Client(base_url=address, headers=headers, timeout=timeout_s)
    except (httpx.InvalidURL, ValueError) as error:
        yield Check(name="address", ok=False, found=f"`{address}` is no address: {error}", hint=_write_it())
        return
    with client:
        found = _address_check(client, address, timeout_s=timeout_s)
        yield found
        if not found.ok or malformed is not None:
            return
        try:
            yield from _answers(client, config)
        except httpx.HTTPError as error:
            yield Check(
                name="address", ok=False, found=f"`{address}` failed: {_reason(error)}", hint="is the service healthy?"
            )


def package_check(version: str | None) -> Check:
    """The SDK's package."""
    if version is None:
        return Check(name="tinker", ok=False, found="the package `tinker` is not installed", hint=INSTALL)
    if _minor(version) < _minor(JSON_TOO):
        return Check(
            name="tinker",
            ok=False,
            found=f"the package `tinker` {version} is too old",
            hint=f'`pip install "tinker>={JSON_TOO}"`',
        )
    return Check(name="tinker", ok=True, found=version)


def _key_check(service: ServiceConfig, key: str) -> Check | None:
    """What is wrong with the key at first sight; None: nothing."""
    if not key:
        hint = f"`export {service.key_env}=tml-…`, the key of the service (any `tml-…` for a server of your own)"
        return Check(name="key", ok=False, found=f"`{service.key_env}` is not set", hint=hint)
    if not key.startswith(KEYS) or not (key.isascii() and key.isprintable()):
        found = f"`{service.key_env}` is no key: one begins with `tml-`, and is plain ASCII"
        return Check(name="key", ok=False, found=found, hint=f"copy the whole key: `export {service.key_env}=tml-…`")
    return None


def _address_check(client: httpx.Client, address: str, *, timeout_s: float) -> Check:
    def failed(found: str, hint: str) -> Check:
        return Check(name="address", ok=False, found=found, hint=hint)

    try:
        answer = client.get("/api/v1/healthz")
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        return failed(f"`{address}` is no address: {error}", _write_it())
    except httpx.TimeoutException:
        return failed(f"`{address}` does not answer within `{timeout_s:g}` s", "is the service overloaded, or blocked?")
    except httpx.HTTPError as error:
        hint = "start the server, or correct `service.url` (docs/hosted.md)"
        return failed(f"`{address}` cannot be reached: {_reason(error)}", hint)
    if answer.status_code == 404:
        hint = f"{_write_it()}, without `/api/v1`"
        return failed(f"`{address}` does not speak the Tinker API: it has no `/api/v1/healthz`", hint)
    if answer.is_redirect:
        hint = "set `service.url` to where it leads: the key is sent nowhere else"
        return failed(f"`{address}` leads to `{answer.headers['location']}`", hint)
    if answer.status_code >= 500:
        return failed(f"`{address}` is not healthy: it answers `{answer.status_code}`", "try again later")
    return Check(name="address", ok=True, found=f"`{address}` answers")


def _answers(client: httpx.Client, config: Config) -> Iterator[Check]:
    """What the service says of the key, the format of requests, and its models."""
    statuses = {name: _status(client, name) for name in FORMATS}
    offered = client.get("/api/v1/get_server_capabilities")
    service = config.service
    if {401, 403} & {*statuses.values(), offered.status_code}:
        hint = f"set `{service.key_env}` to a key of this service; was it revoked?"
        yield Check(name="key", ok=False, found=f"the service refuses the key in `{service.key_env}`", hint=hint)
        return
    yield Check(name="key", ok=True, found=f"`{service.key_env}` is accepted")
    yield format_check(version_of("tinker"), statuses)
    if offered.status_code != 200:
        found = f"the service does not say which models it offers: it answers `{offered.status_code}`"
        yield Check(name="models", ok=None, found=found)
        return
    yield from _model_checks(config, _offered(offered))


def _status(client: httpx.Client, format: str) -> int:
    kind, body = FORMATS[format]
    return client.post("/api/v1/forward_backward", content=body, headers={"content-type": kind}).status_code


def format_check(version: str | None, statuses: Mapping[str, int]) -> Check:
    """Whether the service reads what the SDK writes. `statuses`: format → how a request to train `NOBODY` was answered;
    404 by a service that could read it.
    """
    reads = [name for name, status in statuses.items() if status == 404]
    if not reads:
        said = ", ".join(f"{name}: `{status}`" for name, status in statuses.items())
        return Check(name="format", ok=None, found=f"unknown which requests the service reads ({said})")
    both = " and ".join(reads)
    if "protobuf" in reads or (version is not None and _minor(version) <= _minor(JSON_TOO)):
        return Check(name="format", ok=True, found=f"the service reads {both}")
    needs = f"the service only reads {both}"
    if version is not None:
        needs = f"{needs}, and the package `tinker` {version} writes protobuf"
    return Check(name="format", ok=False, found=needs, hint=f'`pip install "tinker=={JSON_TOO}"`')


def _offered(answer: httpx.Response) -> Offered:
    """Raises `UserError` if the answer lists no models."""
    try:
        models: list[Mapping[str, Any]] = answer.json()["supported_models"]
        return {
            model["model_name"]: model.get("max_context_length")
            for model in models
            if model.get("model_name") and model.get("trainable") is not False
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"the service answered no list of models: {error}", hint="is it a service of the Tinker API?"
        ) from error


def _model_checks(config: Config, offered: Offered) -> Iterator[Check]:
    wanted = list(dict.fromkeys(_wanted(config)))
    if not wanted:
        yield Check(name="models", ok=True, found=f"offered: {', '.join(f'`{name}`' for name in offered) or 'none'}")
    for name in wanted:
        yield _model_check(name, offered, length=config.engine.max_length)


def _model_check(name: str, offered: Offered, *, length: int) -> Check:
    if name not in offered:
        only = next(iter(offered)) if len(offered) == 1 else ""
        hint = f'add `service.model="{only}"`' if only else f"set `service.model`: {meant(name, offered)}"
        return Check(name="model", ok=False, found=f"the service does not offer the model `{name}`", hint=hint)
    longest = offered[name]
    if longest is not None and longest < length:
        found = f"`{name}` is offered with contexts of `{longest}` tokens, but `engine.max_length` is `{length}`"
        return Check(name="model", ok=False, found=found, hint=f"set `engine.max_length={longest}`")
    upto = "" if longest is None else f", with contexts of up to {longest:,} tokens"
    return Check(name="model", ok=True, found=f"`{name}` is offered{upto}")


def _wanted(config: Config) -> Iterator[str]:
    """The service's name for each model that the run needs."""
    for path in model_paths(config).values():
        name = name_of(config, path)
        saved = read_saved(config.root / Path(path).expanduser()) if path else None
        if saved or name:
            yield saved.base if saved else name


def _minor(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _reason(error: Exception) -> str:
    """Its first line, without a number in front."""
    return re.sub(r"^\[Errno -?\d+\] ", "", (str(error) or type(error).__name__).splitlines()[0])


def _write_it() -> str:
    return "write `service.url` as `https://host` or `http://host:port`"
