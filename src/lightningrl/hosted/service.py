"""A session at a service: who is asked, how long, and how it fails."""

import contextlib
import importlib
import logging
import os
import threading
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OutOfTime
from importlib.metadata import version
from typing import Any, Literal, TypeAlias

import httpx
import numpy as np

from lightningrl.config import Config, ServiceConfig
from lightningrl.errors import EngineError, UserError
from lightningrl.hosted.cost import Spent
from lightningrl.hosted.once import Once, takes_client
from lightningrl.types import Doubles

ADDRESS = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""Of Thinking Machines, as the SDK has it (tinker/_client.py)."""
INSTALL = 'install the SDK: `pip install "lightningrl[tinker]"`'
Reduction: TypeAlias = Literal["sum", "row-mean"]
"""How a service reduces the losses of a batch: `trainer.tinker.reduction_of`."""
LOGGERS = ("tinker", "httpx")
"""Loggers of the SDK that would print a line for each retry."""
CONNECT_S, READ_S = 5.0, 60.0
"""The SDK's own limits for one HTTP request."""
UNLOAD_S = 10.0
REFUSED = (401, 402, 403)
"""Statuses of requests that stay wrong however often they are repeated."""


class ServiceError(EngineError):
    """The service refused a request, failed, or did not answer in time."""

    status: int | None = None
    """Of the HTTP answer; None: there was none."""


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

    def logprobs_in(self, answer: Any, lengths: Sequence[int]) -> list[Doubles]:
        """The log-probabilities of each row's targets in the answer to a forward pass, [L] each."""
        lines = [np.asarray(output["logprobs"].data, np.float64).reshape(-1) for output in answer.loss_fn_outputs]
        if list(map(len, lines)) != list(lengths):
            raise ServiceError(f"{self.name} did not return a log-probability for each token that was sent")
        return lines

    def late(self, what: str) -> ServiceError:
        reason = "has it stopped" if self.own else "has the account no credit left"
        hint = f"{reason}, or is it overloaded? raise `service.timeout_s`, or continue later"
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


def name_of(config: Config, path: str) -> str:
    """The service's name for the model that the recipe calls `path`: `service.model` is for those that are trained."""
    trained = {learner.model.path for learner in config.learners().values()}
    return config.service.model if config.service.model and path in trained else path


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
