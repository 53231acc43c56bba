"""How is a recipe's warm start made? A tokenizer and a tiny model, made on the spot, and a short SFT on the recipe's demonstrations.

A recipe's `warmstart.py` says in a `Warmstart` what is its own, and hands that to `main`; the command line is the same for all.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeVar

import typer

from lightningrl.cli.app import main as run
from lightningrl.models.load import load_model, load_tokenizer
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import build_model
from lightningrl.trainer.imitation import Example, imitate, imitator, whole

PEAK_AGAIN = 1e-3
"""The highest learning rate for a model that was trained before."""

D = TypeVar("D")
D_co = TypeVar("D_co", covariant=True)


class Demonstrations(Protocol[D_co]):
    """`perfect`: without the mistakes."""

    def __call__(self, *, seed: int, count: int, perfect: bool) -> Sequence[D_co]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmstart(Generic[D]):
    """What is the recipe's own; numbers are what its command line may change."""

    folder: Path
    """Where the weights go."""
    demonstrations: Demonstrations[D]
    tokenizer_for: Callable[[Sequence[D]], Any]
    """The tokenizer, from the demonstrations."""
    examples: Callable[[D, Any], list[Example]]
    """What is to be imitated of one of them, in that tokenizer's ids."""
    count: int
    """Demonstrations."""
    steps: int
    reading: int = 0
    """Steps before those, in which all is imitated that follows on the first prompt, what tools answer included: copying from there is learnt sooner
    from many tokens than from the few of an answer. None if it goes on from a model folder."""
    reading_prompts: bool = False
    """Whether the first prompt is imitated then, too: who could go on with a story has understood who is who in it."""
    batch: int = 48
    """Demonstrations in a step."""
    peak: float = 3e-3
    """The highest learning rate."""
    hidden: int = 96
    layers: int = 3
    shape: Mapping[str, int] = field(default_factory=dict[str, int])
    """The rest of `build_model`'s sizes, where they are others than its own."""


def main(recipe: Warmstart[Any], *, about: str | None) -> None:
    """Make it as the command line says."""

    def warmstart(
        seed: Annotated[int, typer.Option(help="Of demonstrations and fresh weights.")] = 0,
        order: Annotated[int | None, typer.Option(help="Seed of the order in which demonstrations come. Default: --seed.")] = None,
        steps: int = recipe.steps,
        reading: Annotated[int, typer.Option(help="Steps before, in which what tools answer is learnt, too.")] = recipe.reading,
        seconds: Annotated[float, typer.Option(help="Stop after this much time of training.")] = math.inf,
        batch: Annotated[int, typer.Option(help="Demonstrations in a step.")] = recipe.batch,
        peak: Annotated[float | None, typer.Option(help=f"Highest learning rate. Default: {recipe.peak}; {PEAK_AGAIN} to go on.")] = None,
        hidden: Annotated[int, typer.Option(help="Size of the model.")] = recipe.hidden,
        layers: int = recipe.layers,
        demonstrations: Annotated[int, typer.Option(help="How many.")] = recipe.count,
        perfect: Annotated[bool, typer.Option("--perfect", help="Leave the mistakes out: what the model could learn at best.")] = False,
        base: Annotated[
            Path | None, typer.Option("--continue", help="A model folder to go on from: the control that reinforcement learning is held against.")
        ] = None,
        threads: Annotated[int, typer.Option(help="With 1, weights are the same bit for bit on any number of cores.")] = 1,
        out: Path = recipe.folder,
    ) -> None:
        keep_freed_memory()
        shown = recipe.demonstrations(seed=seed, count=demonstrations, perfect=perfect)
        if base is None:
            tokenizer = recipe.tokenizer_for(shown)
            size = {"hidden": hidden, "layers": layers, **recipe.shape}
            ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            model = build_model(len(tokenizer), seed=seed, **size, **ends)
        else:
            model, tokenizer = load_model(str(base)), load_tokenizer(str(base))
        highest = peak or (recipe.peak if base is None else PEAK_AGAIN)
        trainer = imitator(model, tokenizer=tokenizer, threads=threads)
        conversations = [recipe.examples(demonstration, tokenizer) for demonstration in shown]
        began, order_seed = time.perf_counter(), seed if order is None else order
        if base is None and reading:
            texts = [[whole(made, prompt=recipe.reading_prompts)] for made in conversations]
            for step, loss in imitate(trainer, texts, peak=highest, steps=reading, size=batch, seed=order_seed):
                typer.echo(f"reading, step {step}  loss {loss:.3f}  {time.perf_counter() - began:.0f} s")
        for step, loss in imitate(trainer, conversations, peak=highest, steps=steps, seconds=seconds, size=batch, seed=order_seed):
            typer.echo(f"step {step}  loss {loss:.3f}  {time.perf_counter() - began:.0f} s")
        trainer.publish(out)
        typer.echo(f"{sum(p.numel() for p in model.hf.parameters()):,} parameters, {len(tokenizer)} tokens, in {out}")

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=(about or "").replace("\n\n", "\n\n\b\n"))(warmstart)
    run(app)
