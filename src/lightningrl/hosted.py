"""A service that speaks the Tinker API, through its official SDK: who is asked, how long, and what it has cost.

A `RemotePolicy` is one adapter at the service. Trainer and engine of a policy share it: the trainer saves weights for
sampling, and the engine samples from what was saved.
"""

import contextlib
import importlib
import json
import logging
import os
import secrets
import tarfile
import tempfile
import threading
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx
import msgspec
import numpy as np

from lightningrl.config import Config, LearnerConfig, ServiceConfig
from lightningrl.errors import EngineError, UserError
from lightningrl.plugins import names
from lightningrl.types import Doubles

RECORD = "hosted.json"
"""File of a checkpoint that says where the service keeps it."""
ADDRESS = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""Of Thinking Machines, as the SDK has it (tinker/_client.py)."""
INSTALL = 'install the SDK: `pip install "lightningrl[tinker]"`'
ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a peft folder."""
Reduction: TypeAlias = Literal["sum", "row-mean"]
"""How a service reduces the losses of a batch: `trainer.tinker.reduction_of`."""
LOGGERS = ("tinker", "httpx")
"""Loggers of the SDK that would print a line for each retry."""
ONCE = ("/forward_backward", "/optim_step", "/save_weights", "/save_weights_for_sampler")
"""Ends of the paths of requests that change something each time they arrive, or fail the second time."""
UNKNOWN = 424
"""Status that the SDK does not retry: an answer is lost, and the service may have done what was asked."""
CONNECT_S, READ_S = 5.0, 60.0
"""The SDK's own limits for one HTTP request."""
UNLOAD_S = 10.0
REFUSED = (401, 402, 403)
"""Statuses of requests that stay wrong however often they are repeated."""
SAVES = 3
"""How often weights are saved, if the service fails. Each time has a name of its own."""


class ServiceError(EngineError):
    """The service refused a request, failed, or did not answer in time."""

    status: int | None = None
    """Of the HTTP answer; None: there was none."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Where a service keeps a version of an adapter. Empty strings: it does not keep this part."""

    base: str
    """The service's name for the model below the adapter."""
    rank: int
    state: str
    """`tinker://…` path of weights and optimizer."""
    sampler: str
    """`tinker://…` path of the weights for sampling."""
    steps: int
    """Number of updates made so far."""


@dataclass(slots=True)
class Spent:
    """Tokens that the service has processed since the start of this process."""

    prefill: int = 0
    """Tokens of prompts, each time one was sent."""
    sample: int = 0
    """Tokens that were sampled."""
    train: int = 0
    """Tokens of rows in forward and backward passes."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    told: dict[str, int] = field(default_factory=dict[str, int])
    """The counts at the last call of `metrics`."""

    def add(self, *, prefill: int = 0, sample: int = 0, train: int = 0) -> None:
        with self.lock:
            self.prefill += prefill
            self.sample += sample
            self.train += train

    def tokens(self) -> dict[str, int]:
        with self.lock:
            return {"prefill": self.prefill, "sample": self.sample, "train": self.train}

    def metrics(self, prices: Mapping[str, float]) -> dict[str, float]:
        """Tokens since the last call, and US dollars if all prices are known. It is a count, not the service's bill."""
        counts = self.tokens()
        fresh = {f"service/{kind}": float(count - self.told.get(kind, 0)) for kind, count in counts.items()}
        self.told = counts
        cost = dollars({kind: fresh[f"service/{kind}"] for kind in counts}, prices)
        return fresh if cost is None else fresh | {"service/usd": cost}


def dollars(tokens: Mapping[str, float], prices: Mapping[str, float]) -> float | None:
    """The cost of tokens by kind, at prices for a million; None: the price of a kind is missing."""
    if not tokens.keys() <= prices.keys():
        return None
    return sum(count * prices[kind] for kind, count in tokens.items()) / 1e6


class Once(httpx.AsyncBaseTransport):
    """Keeps the SDK from sending a request twice that the service may have taken the first time.

    The SDK repeats what failed, and numbers requests so that a service can tell. SkyRL 0.3 does not look at the
    numbers: it adds the gradient again, or makes an update of momentum alone.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith(ONCE):
            return await self._inner.handle_async_request(request)
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
            raise  # it never left
        except httpx.TransportError as error:
            return _unknown(request, str(error) or type(error).__name__)
        if response.status_code < 500 and response.status_code != 408:
            return response
        await response.aclose()
        return _unknown(request, f"status {response.status_code}")

    async def aclose(self) -> None:
        await self._inner.aclose()


def _unknown(request: httpx.Request, said: str) -> httpx.Response:
    detail = f"no answer to `{request.url.path.rpartition('/')[2]}` ({said}), so it is unknown whether it was done"
    return httpx.Response(UNKNOWN, json={"detail": detail}, request=request)


class Service:
    """A session at a service. The SDK keeps it alive from a thread of its own, until `close`."""

    def __init__(self, config: ServiceConfig) -> None:
        self.sdk = sdk()
        self.config = config
        self.address = address_of(config)
        self.own = self.address != ADDRESS
        """Whether it is not that of Thinking Machines, but e.g. SkyRL's server on machines of one's own."""
        self.spent = Spent()
        self.reduction: Reduction | None = None
        """None: not known yet."""
        self._client: Any = None
        self._adapters: list[Any] = []
        """Training clients of the adapters that the server holds for this session."""

    @property
    def client(self) -> Any:
        """The SDK's `ServiceClient`; made at its first use."""
        if self._client is None:
            address = self._address()
            self._client = self.call("open a session", lambda: self.sdk.ServiceClient(**address))
        return self._client

    def call(self, what: str, request: Callable[[], Any]) -> Any:
        """The result of a request, waited for at most `timeout_s`. Raises `ServiceError`.

        The SDK has no limit for some requests, so each is made in a thread that may be left behind.
        """
        answer = Future[Any]()

        def ask() -> None:
            try:
                asked = request()
                answer.set_result(asked.result() if callable(getattr(asked, "result", None)) else asked)
            except (Exception, CancelledError) as error:  # noqa: BLE001 - raised again below
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True, name=f"service: {what}").start()
        try:
            return answer.result(timeout=self.config.timeout_s)
        except (OutOfTime, TimeoutError) as error:
            raise self.late(what) from error
        except Exception as error:
            raise self.failed(what, error) from error

    def adapter(self, what: str, make: Callable[[], Any]) -> Any:
        """The SDK's training client of a new adapter. The server holds it until `unload`, or the end of the session."""
        made = self.call(what, make)
        self._adapters.append(made)
        return made

    def unload(self, adapter: Any) -> None:
        """Have a server of one's own forget an adapter that nobody needs: it has room for few. What was saved stays."""
        self._adapters.remove(adapter)
        if not self.own:
            return
        with contextlib.suppress(httpx.HTTPError):  # the server forgets it later by itself
            url = f"{self.address.rstrip('/')}/api/v1/unload_model"
            headers = {"X-API-Key": os.environ.get(self.config.key_env, "")}
            httpx.post(url, json={"model_id": adapter.model_id}, headers=headers, timeout=UNLOAD_S)

    def still_update(self, adapter: Any) -> Mapping[str, float]:
        """Drop the gradients that were added and not applied, by an update at rate 0. It changes the optimizer's
        moments. Returns the service's metrics.
        """
        still = self.sdk.types.AdamParams(learning_rate=0.0)
        return self.call("drop gradients", lambda: adapter.optim_step(still)).metrics or {}

    def late(self, what: str) -> ServiceError:
        hint = "is the service overloaded, or the account without credit? raise `service.timeout_s`, or continue later"
        return ServiceError(f"{self.name} did not {what} within `{self.config.timeout_s:g}` s", hint=hint)

    def failed(self, what: str, error: Exception) -> ServiceError:
        said, status = _said(error), _status(error)
        hints = {
            401: f"is `{self.config.key_env}` the key of this service?",
            402: "the account has no credit left",
            403: f"may the key in `{self.config.key_env}` do this?",
            404: "the service has forgotten it: continue the run with `--resume`",
            429: "the service is at its limit: continue the run later",
        }
        hint = hints.get(status or 0, "continue the run with `--resume` once the service answers again")
        failure = ServiceError(f"{self.name} did not {what}: {said}", hint=hint)
        failure.status = status
        return failure

    @property
    def name(self) -> str:
        return f"the service at `{self.address}`" if self.own else "the service"

    def close(self) -> None:
        """Give back what the service holds for this session, and end the session's threads."""
        for adapter in list(self._adapters):
            self.unload(adapter)
        if self._client is not None:
            self._client.holder.close()
            self._client = None

    def _address(self) -> dict[str, Any]:
        key = os.environ.get(self.config.key_env, "")
        if not key:
            hint = f"set `{self.config.key_env}` to the key of the service (any `tml-…` for a server of your own)"
            raise UserError(f"`{self.config.key_env}` is not set", hint=hint)
        return {"api_key": key} | (self._server() if self.own else {})

    def _server(self) -> dict[str, Any]:
        """Where a server of one's own is, and how it is asked. Later SDKs take no client: their servers have to know
        repeated requests by their numbers, as the service of Thinking Machines does.
        """
        if not takes_client(version("tinker")):
            return {"base_url": self.address}
        limits = httpx.Limits(max_connections=1000, max_keepalive_connections=20)
        timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
        # Redirects are not followed: the key would go with them.
        client = httpx.AsyncClient(transport=Once(httpx.AsyncHTTPTransport(limits=limits)), timeout=timeout)
        return {"base_url": self.address, "http_client": client}


class RemotePolicy:
    """One adapter that lives at a service, and the session through which it is trained."""

    adapter = "remote"
    """It is an adapter, as `models.base.Decoder.adapter` says of a local one."""

    def __init__(self, service: Service, *, base: str, rank: int, seed: int, begin: Saved | None = None) -> None:
        """`base`: the service's name for the model. `begin`: start from this version, with its optimizer; None: from
        the model, with a new adapter made from `seed`.
        """
        self.service = service
        self._begin = begin
        self.base = begin.base if begin else base
        self.rank = begin.rank if begin else rank
        self.steps = begin.steps if begin else 0
        self.samplers: dict[Path, str] = {}
        """Checkpoint folder → path of its weights for sampling, for those that this session has saved."""
        self.training: Any = None
        """The SDK's `TrainingClient`."""
        self._retired: list[Any] = []
        if begin is not None:
            self.take_up(begin)
            return
        self.training = service.adapter(
            f"create an adapter of `{self.base}`",
            lambda: service.client.create_lora_training_client(base_model=self.base, rank=self.rank, seed=seed),
        )
        self._clear(state="")

    def take_up(self, saved: Saved) -> None:
        """Continue from a version that the service keeps, in a new adapter: what the old one had begun is dropped."""
        service, old = self.service, self.training
        self.training = service.adapter(
            f"continue from `{saved.state}`",
            lambda: service.client.create_training_client_from_state_with_optimizer(saved.state),
        )
        if old is not None:
            self._retired.append(old)
        self._clear(state=saved.state)
        self.steps = saved.steps

    def _clear(self, *, state: str) -> None:
        """Drop the gradients that an adapter of somebody else has left in the new one: SkyRL 0.3 gives it the memory
        of an adapter that has ended, as it is. `state`: what the new one was loaded from; empty: from nothing.
        """
        if not self.service.own:
            return
        state = state or self.save_state()
        self.service.still_update(self.training)
        self.service.call(f"load `{state}`", lambda: self.training.load_state_with_optimizer(state))

    def unload_retired(self) -> None:
        """Give back the adapters before the last `take_up`. Until then, they answer for versions they have saved."""
        while self._retired:
            self.service.unload(self._retired.pop())

    def scratch(self) -> Any:
        """A training client of a new adapter that nobody keeps. It computes what the model without it computes."""
        client = self.service.client
        return self.service.adapter(
            f"create an adapter of `{self.base}`",
            lambda: client.create_lora_training_client(base_model=self.base, rank=1, seed=0),
        )

    def untrained(self) -> Any:
        """A training client with the weights at the start of training."""
        begin, client = self._begin, self.service.client
        if begin is None:
            return self.scratch()
        make = client.create_training_client_from_state
        return self.service.adapter(f"load `{begin.state}`", lambda: make(begin.state))

    def download(self, sampler: str, folder: Path) -> None:
        """Write the adapter at the path `sampler` into `folder`, as peft names its files."""
        service = self.service
        rest = service.client.create_rest_client()
        # As the service wrote the path: Tinker's is `RUN/sampler_weights/NAME`, SkyRL's `RUN/NAME`.
        run, _, name = sampler.removeprefix("tinker://").partition("/")
        answer = service.call("export the adapter", lambda: rest.get_checkpoint_archive_url(run, name))
        try:
            with httpx.stream("GET", answer.url, timeout=service.config.timeout_s, follow_redirects=True) as body:
                body.raise_for_status()
                with tempfile.TemporaryFile() as file:
                    for piece in body.iter_bytes():
                        file.write(piece)
                    file.seek(0)
                    with tarfile.open(fileobj=file) as archive:
                        archive.extractall(folder, filter="data")
            _complete(folder / ADAPTER)
        except (httpx.HTTPError, tarfile.TarError, OSError, ValueError) as error:
            raise service.failed("export the adapter", error) from error

    def save_state(self) -> str:
        """Keep weights and optimizer at the service. Returns the path."""
        return self._saved(self.training.save_state)

    def save_sampler(self) -> str:
        """Keep the weights for sampling at the service. Returns the path."""
        return self._saved(self.training.save_weights_for_sampler)

    def _saved(self, save: Callable[[str], Any]) -> str:
        # Saving once more changes nothing, so a lost answer is no reason to stop.
        for left in reversed(range(SAVES)):
            name = f"step-{self.steps:05d}-{secrets.token_hex(4)}"
            try:
                return self.service.call("save the weights", lambda name=name: save(name)).path
            except ServiceError as error:
                if not left or error.status != UNKNOWN:
                    raise
        raise AssertionError("unreachable")

    def describe(self, *, state: str, sampler: str) -> Saved:
        return Saved(base=self.base, rank=self.rank, state=state, sampler=sampler, steps=self.steps)


def _complete(file: Path) -> None:
    """Name the adapted layers in peft's configuration, if it leaves them open: SkyRL does, and no reader can guess."""
    settings = json.loads(file.read_bytes())
    if settings.get("target_modules"):
        return
    weights = (file.parent / WEIGHTS).read_bytes()
    names = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])  # the header of a safetensors file
    layers = {name.rsplit(".", 3)[-3] for name in names if name.endswith(".lora_A.weight")}
    file.write_text(json.dumps(settings | {"target_modules": sorted(layers), "task_type": "CAUSAL_LM"}, indent=2))


class RemoteModel:
    """A model at a service that is not trained: it answers for frozen policies, and in replays."""

    def __init__(self, service: Service, *, base: str, begin: Saved | None) -> None:
        """`base`: the service's name for the model. `begin`: answer with this version; None: without an adapter."""
        self.service, self._base, self._begin = service, base, begin
        self.samplers: dict[Path, str] = {}

    def sampler(self) -> Any:
        """The SDK's `SamplingClient`. A version is loaded for it: a service may serve no others."""
        service, begin = self.service, self._begin
        make = service.client.create_sampling_client
        if begin is None:
            return service.call(f"sample from `{self._base}`", lambda: make(base_model=self._base))
        path = RemotePolicy(service, base=begin.base, rank=begin.rank, seed=0, begin=begin).save_sampler()
        return service.call(f"sample from `{path}`", lambda: make(model_path=path))


def sdk() -> Any:
    """The module `tinker`, which then reports nothing to the service, unless `TINKER_TELEMETRY` says so. Raises
    `UserError` if it is not installed.
    """
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    try:
        module = importlib.import_module("tinker")
    except ImportError as error:
        raise UserError(f'`backend = "tinker"` needs the package `tinker`: {error}', hint=INSTALL) from error
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    return module


def address_of(config: ServiceConfig) -> str:
    """Base URL of the service: that of the recipe, or of `TINKER_BASE_URL` as the SDK reads it, or `ADDRESS`."""
    return config.url or os.environ.get("TINKER_BASE_URL", "") or ADDRESS


def _status(error: BaseException) -> int | None:
    """That of the HTTP answer behind an error. The SDK raises a `ValueError` from it for what was asked for later."""
    for found in (error, error.__cause__):
        status = getattr(getattr(found, "response", found), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _said(error: Exception) -> str:
    """What it says in a line. The message of an `HTTPStatusError` has the whole address, which may be signed."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    return (str(error) or type(error).__name__).strip().splitlines()[0][:300]


def check_learner(learner: LearnerConfig, *, section: str, root: Path) -> None:
    """Raises `UserError` if a service cannot train this policy. `section`: where its settings are, e.g.
    `policies.NAME.`; `root`: the folder that `model.path` is relative to.
    """
    if learner.model.lora_rank == 0 and not is_hosted(learner.model.path, root=root):
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


def takes_client(release: str) -> bool:
    """Whether this release of the SDK passes on an HTTP client of ours."""
    major, minor = release.split(".")[:2]
    return (int(major), int(minor)) < (0, 25)


def write_saved(folder: Path, saved: Saved) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{RECORD}.draft"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=2))
    draft.replace(folder / RECORD)


def read_saved(folder: Path) -> Saved | None:
    """None: the folder has no such record."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=Saved)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"`{folder / RECORD}` cannot be read: {error}", hint="restore it from a copy") from error


def name_of(config: Config, path: str) -> str:
    """The service's name for the model that the recipe calls `path`: `service.model` is for those that are trained."""
    trained = {learner.model.path for learner in config.learners().values()}
    return config.service.model if config.service.model and path in trained else path


def is_hosted(path: str, *, root: Path) -> bool:
    """Whether `path` is a folder that says where a service keeps its weights."""
    return (root / Path(path).expanduser() / RECORD).is_file()


def logprobs_in(outputs: Sequence[Mapping[str, Any]], lengths: Sequence[int], *, service: Service) -> list[Doubles]:
    """The log-probabilities of each row's targets, [L] each."""
    if len(outputs) != len(lengths):
        raise ServiceError(f"{service.name} answered `{len(outputs)}` of `{len(lengths)}` rows")
    found = [np.asarray(output["logprobs"].data, np.float64).reshape(-1) for output in outputs]
    for logprobs, length in zip(found, lengths, strict=True):
        if len(logprobs) != length:
            message = f"{service.name} returned `{len(logprobs)}` log-probabilities for a row of `{length}` tokens"
            raise ServiceError(message)
    return found
