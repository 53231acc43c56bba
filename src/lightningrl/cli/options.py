"""The options that several commands share, with their help."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Override settings of the recipe, e.g. `trainer.learning_rate=1e-4`."),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", metavar="", help="Print the result as one line of JSON, last on stdout; all else goes to stderr."
    ),
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="The run's folder. Default: a new one under `runs/`.")]
Backend = Annotated[
    Literal["local", "tinker"] | None,
    typer.Option(
        "--backend", help="`tinker`: check a service that speaks the Tinker API. Default: `backend` of the recipe."
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help="A model folder, the folder of a run, or `URL#model` of a server. Default: `model.path` of the recipe.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", metavar="", help="Print the resolved settings and stop.")]
Estimate = Annotated[
    bool,
    typer.Option("--estimate", metavar="", help="Print memory, time and price of the run, and stop. Trains nothing."),
]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="With `--estimate`: for a `h100`, `a100`, `l4`, `4090` or `t4`. Default: this machine."),
]
PerHour = Annotated[
    float | None,
    typer.Option("--per-hour", min=0, help="With `--estimate`: the price of an hour, for that of the run."),
]
Calls = Annotated[
    float | None,
    typer.Option(
        "--calls", min=1, help="With `--estimate`: calls of a rollout. Default: as recorded, or from a trial."
    ),
]
PromptTokens = Annotated[
    float | None, typer.Option("--prompt-tokens", min=0, help="With `--estimate`: tokens that the first call reads.")
]
CompletionTokens = Annotated[
    float | None, typer.Option("--completion-tokens", min=1, help="With `--estimate`: tokens that a call samples.")
]
NoUi = Annotated[
    bool, typer.Option("--no-ui", metavar="", help="Do not offer the page on which the run can be watched.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        metavar="",
        help="Continue an interrupted run: that in `--run-dir`, or the latest run of this recipe.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Let workers on other machines connect here, e.g. to `0.0.0.0:8100` (see `lightningrl worker`).",
    ),
]
TokenColours = Literal["none", "logprob", "advantage"]
KeyFile = Annotated[
    Path, typer.Option("--key-file", help="A copy of `worker.key` from the run's folder on the server.")
]
RecipeCopy = Annotated[
    Path, typer.Option("--recipe", help="This machine's copy of the recipe: its folder, or its recipe.toml.")
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", help="Take also rollouts that ask for this label (`agent.labels`); may be repeated."),
]
CaFile = Annotated[
    Path | None, typer.Option("--ca-file", help="Trust these certificates (PEM) in place of the system's.")
]
JsonEvents = Annotated[
    bool, typer.Option("--json", metavar="", help="Print one JSON object for each event; all else goes to stderr.")
]
AcceptDifferences = Annotated[
    bool, typer.Option("--accept-differences", metavar="", help="Work although the recipe is not the server's.")
]
On = Annotated[
    Literal["ray"] | None,
    typer.Option("--on", help="Run the workers on a Ray cluster. Needs `lightningrl[ray]`, here and on its nodes."),
]
Count = Annotated[int | None, typer.Option("--count", min=1, help="With `--on ray`: number of workers. Default: 1.")]
Cpus = Annotated[
    float | None, typer.Option("--cpus", min=0, help="With `--on ray`: cores reserved for each worker. Default: 1.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address", help="With `--on ray`: the cluster's address. Default: `RAY_ADDRESS`, or that of this machine."
    ),
]
Shared = Annotated[
    bool,
    typer.Option(
        "--shared", metavar="", help="With `--on ray`: do not copy the recipe; its folder has this path on every node."
    ),
]
At = Annotated[
    int | None,
    typer.Option("--at", min=1, help="Number of the call that is answered otherwise, as `lightningrl show` counts."),
]
Answer = Annotated[
    str | None,
    typer.Option("--answer", help="With `--at`: the answer, a text or JSON with `content` and `tool_calls`."),
]
Samples = Annotated[
    int | None, typer.Option("--samples", min=1, help="With `--at`: sample the answer N times, and what follows it.")
]
Answering = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        help="With `--at`: a model folder or a run's folder, for fresh answers. Default: the weights that answered.",
    ),
]
NoEngine = Annotated[
    bool,
    typer.Option(
        "--no-engine", metavar="", help="With `--answer`: load no weights; stop at the next call that is not recorded."
    ),
]
AttemptNumber = Annotated[
    int | None,
    typer.Option("--attempt", min=1, help="Replay this attempt of the rollout. Default: the accepted one."),
]
Every = Annotated[
    bool, typer.Option("--all", metavar="", help="Replay all rollouts that succeeded; exit code 1 if any parts.")
]
