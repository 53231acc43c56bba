"""Adapters that live at a service, and models that only answer there.

Trainer and engine of a policy share a `RemotePolicy`: the trainer saves weights for sampling, and the engine samples
from what was saved.
"""

import json
import secrets
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from lightningrl.hosted.kept import Saved
from lightningrl.hosted.once import UNKNOWN
from lightningrl.hosted.service import Service, ServiceError

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a peft folder."""
MARKED = range(4, 37)
"""Token ids, in every vocabulary. Their log-probabilities tell versions of an adapter apart."""
SAVES = 3
"""How often weights are saved, if the service fails. Each time has a name of its own."""


class RemotePolicy:
    """One adapter that lives at a service, and the session through which it is trained."""

    adapter = "remote"
    """It is an adapter, as `models.base.Decoder.adapter` says of a local one."""

    def __init__(
        self, service: Service, *, base: str, rank: int, seed: int, near: float, begin: Saved | None = None
    ) -> None:
        """`base`: the service's name for the model. `near`: largest mean |Δ logprob| (nats) between equal weights.
        `begin`: start from this version, with its optimizer; None: from the model, with a new adapter made from `seed`.
        """
        self.service, self._near = service, near
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
        """Continue from a version that the service keeps, in a new adapter: what the old one had begun is dropped.
        Raises `ServiceError` if it then has other weights than were saved.
        """
        service, old = self.service, self.training
        self.training = service.adapter(
            f"continue from `{saved.state}`",
            lambda: service.client.create_training_client_from_state_with_optimizer(saved.state),
        )
        if old is not None:
            self._retired.append(old)
        self._clear(state=saved.state)
        self.steps = saved.steps
        # SkyRL 0.3 says that it has loaded a version whose folder is gone, and goes on with a new adapter.
        gap = float(np.abs(np.subtract(saved.marks, self.marks())).mean()) if saved.marks else 0.0
        if not gap <= self._near:  # NaN fails, too
            hint = "was this version deleted there? restore it, or start a new run with another `--run-dir`"
            said = f"its log-probabilities differ by `{gap:.2g}` on average from those of the saved weights"
            raise ServiceError(f"{service.name} did not continue from `{saved.state}`: {said}", hint=hint)

    def marks(self) -> tuple[float, ...]:
        """Log-probabilities of `MARKED` under the current weights, without the first."""
        types, (first, *rest) = self.service.sdk.types, MARKED
        inputs = {
            "target_tokens": types.TensorData.from_numpy(np.array(rest)),
            "weights": types.TensorData.from_numpy(np.ones(len(rest), np.float32)),
        }
        datum = types.Datum(model_input=types.ModelInput.from_ints([first, *rest[:-1]]), loss_fn_inputs=inputs)
        answer = self.service.call("evaluate", lambda: self.training.forward([datum], "cross_entropy"))
        self.service.spent.add(train=len(rest))
        (found,) = self.service.logprobs_in(answer, [len(rest)])
        if not np.isfinite(found).all():
            raise ServiceError(f"{self.service.name} returned log-probabilities that are not finite")
        return tuple(found.tolist())

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

    def describe(self, *, state: str = "", sampler: str = "") -> Saved:
        """The record of the current weights. Paths: where they were saved."""
        marks = self.marks() if state else ()
        return Saved(base=self.base, rank=self.rank, state=state, sampler=sampler, steps=self.steps, marks=marks)


class RemoteModel:
    """A model at a service that is not trained: it answers for frozen policies, and in replays."""

    def __init__(self, service: Service, *, base: str, near: float, begin: Saved | None) -> None:
        """`base`, `near`: as of `RemotePolicy`. `begin`: answer with this version; None: without an adapter."""
        self.service, self._base, self._near, self._begin = service, base, near, begin
        self.samplers: dict[Path, str] = {}

    def sampler(self) -> Any:
        """The SDK's `SamplingClient`. A version is loaded for it: a service may serve no others."""
        service, begin = self.service, self._begin
        make = service.client.create_sampling_client
        if begin is None:
            return service.call(f"sample from `{self._base}`", lambda: make(base_model=self._base))
        policy = RemotePolicy(service, base=begin.base, rank=begin.rank, seed=0, near=self._near, begin=begin)
        path = policy.save_sampler()
        return service.call(f"sample from `{path}`", lambda: make(model_path=path))


def _complete(file: Path) -> None:
    """Name the adapted layers in peft's configuration, if it leaves them open: SkyRL does, and no reader can guess."""
    settings = json.loads(file.read_bytes())
    if settings.get("target_modules"):
        return
    weights = (file.parent / WEIGHTS).read_bytes()
    names = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])  # the header of a safetensors file
    layers = {name.rsplit(".", 3)[-3] for name in names if name.endswith(".lora_A.weight")}
    file.write_text(json.dumps(settings | {"target_modules": sorted(layers), "task_type": "CAUSAL_LM"}, indent=2))
