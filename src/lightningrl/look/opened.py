"""Opens a run for reading: its store, its settings and its tokenizers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.look.step import Steps, StepTaught, state_of, step_taught
from lightningrl.look.texts import Texts, texts_from
from lightningrl.recipe import load_config
from lightningrl.store import Records, open_records
from lightningrl.store.place import found_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A run that is open for reading."""

    file: Path
    """Path of its store.sqlite, or of its store.url."""
    records: Records
    config: Config | None
    """Settings of the training run; None if it has none, or if they cannot be read."""
    no_config: str = ""
    """Why `config` is None."""
    steps: Steps = field(default_factory=Steps, compare=False)

    async def step(self, config: Config, step: int) -> tuple[StepTaught, bool]:
        """What a step, counted from 0, taught; and whether its weights are published. It is computed once."""
        versions = [await self.records.weights(name) for name in config.learners()]
        learnt = all(weights is not None and weights.version > step for weights in versions)
        folder = self.file.parent

        async def make() -> StepTaught:
            return await step_taught(self.records, config, folder=folder, step=step, learnt=learnt)

        state = await state_of(self.records, config, folder=folder, step=step, learnt=learnt)
        return await self.steps.of(step, state=state, make=make), learnt

    def texts(self, policy: str) -> Texts | None:
        """The texts of the policy's tokens; None if no tokenizer file is found."""
        file = next((file for file in self._tokenizers(policy) if file.is_file()), None)
        return None if file is None else texts_from(file)

    def _tokenizers(self, policy: str) -> list[Path]:
        run = self.file.parent
        folders = [run / "model" / policy, run / "model"]
        folders += [
            path
            for step in sorted((run / "checkpoints").glob("step-*"), reverse=True)
            for path in (step / policy, step)
        ]
        if self.config is not None:
            learner = self.config.learners().get(policy, self.config)
            folders += [self.config.root / learner.model.path, self.config.root / self.config.model.path]
        return [folder / "tokenizer.json" for folder in folders]


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Opened]:
    """Open a run's folder, or its store.sqlite, for reading. Raises `UserError` if there are no records."""
    file, url = found_at(path)
    config, why = settings_of(file.parent / "config.toml")
    records = await open_records(url)
    try:
        yield Opened(file=file, records=records, config=config, no_config=why)
    finally:
        await records.close()


def settings_of(file: Path) -> tuple[Config | None, str]:
    """(settings, why they are missing). Settings of another version of LightningRL may not be readable."""
    if not file.is_file():
        return None, "the run's folder has no config.toml"
    try:
        return load_config(file), ""
    except UserError as error:
        return None, f"the run's settings cannot be read: {error.message}"
