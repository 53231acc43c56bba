"""Find an implementation by its name: built-in name | entry point | `pkg.module:attr`.

Lower rooms load implementations of higher rooms through this module, so they import none of them.
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lightningrl.errors import UserError, meant

BUILTIN: Mapping[str, Mapping[str, str]] = {
    "store": {
        "sqlite": "lightningrl.store.sqlite:SQLiteStore",
        "postgresql": "lightningrl.store.postgres:PostgresStore",
    },
    "engine": {
        "embedded": "lightningrl.engine.embedded:embedded",
        "vllm": "lightningrl.engine.vllm:VLLMEngine",
        "relay": "lightningrl.engine.relay:RelayEngine",
        "tinker": "lightningrl.engine.tinker:TinkerEngine",
    },
    "trainer": {
        "local": "lightningrl.trainer.local:LocalTrainer",
        "tinker": "lightningrl.trainer.tinker:TinkerTrainer",
    },
    "dialect": {
        "openai.chat": "lightningrl.dialects.openai_chat:OpenAIChat",
        "openai.responses": "lightningrl.dialects.openai_responses:OpenAIResponses",
        "openai.completions": "lightningrl.dialects.openai_completions:OpenAICompletions",
        "anthropic.messages": "lightningrl.dialects.anthropic_messages:AnthropicMessages",
        "google.gemini": "lightningrl.dialects.gemini:Gemini",
    },
    "credit": {
        "uniform": "lightningrl.algorithms.credit:uniform",
        "discounted": "lightningrl.algorithms.credit:discounted",
        "air": "lightningrl.algorithms.credit:air",
        "gae_calls": "lightningrl.algorithms.credit:gae_calls",
        "fork": "lightningrl.algorithms.credit_fork:fork",
        "gigpo": "lightningrl.algorithms.credit_states:gigpo",
        "tree_loo": "lightningrl.algorithms.credit_states:tree_loo",
    },
    "advantage": {
        "grpo": "lightningrl.algorithms.advantage:grpo",
        "rloo": "lightningrl.algorithms.advantage:rloo",
        "dr_grpo": "lightningrl.algorithms.advantage:dr_grpo",
        "reinforce++": "lightningrl.algorithms.advantage:reinforce_pp",
        "reinforce++-baseline": "lightningrl.algorithms.advantage:reinforce_pp_baseline",
        "opo": "lightningrl.algorithms.advantage:opo",
    },
    "air": {
        "tool_ok": "lightningrl.algorithms.air:tool_ok",
        "tool_failed": "lightningrl.algorithms.air:tool_failed",
        "tool_raised": "lightningrl.algorithms.air:tool_raised",
        "repeated_call": "lightningrl.algorithms.air:repeated_call",
        "malformed_arguments": "lightningrl.algorithms.air:malformed_arguments",
        "slow": "lightningrl.algorithms.air:slow",
        "costly": "lightningrl.algorithms.air:costly",
        "empty_retrieval": "lightningrl.algorithms.air:empty_retrieval",
        "guardrail": "lightningrl.algorithms.air:guardrail",
    },
    "logger": {
        "wandb": "lightningrl.loggers.wandb:WeightsAndBiases",
        "trackio": "lightningrl.loggers.trackio:Trackio",
        "mlflow": "lightningrl.loggers.mlflow:MLflow",
        "tensorboard": "lightningrl.loggers.tensorboard:TensorBoard",
        "otlp": "lightningrl.loggers.otlp:OTLP",
    },
}
"""kind → name → `module:attribute`. Other packages add names as entry points in the group `lightningrl.<kind>`."""

INSTALL: Mapping[str, str] = {
    "psycopg": 'pip install "lightningrl[postgres]"',
    "wandb": 'pip install "lightningrl[wandb]"',
    "trackio": 'pip install "lightningrl[trackio]"',
    "mlflow": 'pip install "lightningrl[mlflow]"',
    "tensorboardX": 'pip install "lightningrl[tensorboard]"',
}
"""Missing module → the command that installs it, if it is not the package of that name."""


def names(kind: str) -> list[str]:
    """All names that `load` accepts for `kind`, apart from `pkg.module:attr`."""
    return sorted({*BUILTIN.get(kind, {}), *(e.name for e in entry_points(group=f"lightningrl.{kind}"))})


def load(name: str, *, kind: str, root: Path | None = None) -> Any:
    """Import and return the object named `name`. `pkg.module:attr` may also be imported from the folder `root`. Raises
    `UserError` if there is no such object.
    """
    if name in BUILTIN.get(kind, {}):
        return _attribute(BUILTIN[kind][name], kind=kind)
    for entry in entry_points(group=f"lightningrl.{kind}", name=name):
        return entry.load()
    if ":" not in name:
        raise UserError(f"unknown {kind} `{name}`", hint=f"{meant(name, names(kind))}; or `pkg.module:attr`")
    if root is not None:
        _enter(root.resolve(), name.partition(":")[0].partition(".")[0])
    return _attribute(name, kind=kind)


def _enter(root: Path, module: str) -> None:
    """Make `module` importable from `root`. If another recipe's module of that name is loaded, unload all modules of
    that recipe's folder first.
    """
    ours = _files(root, module)
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded and Path(loaded) not in ours and any(file.exists() for file in ours):
        former = Path(loaded).parent.parent if Path(loaded).name == "__init__.py" else Path(loaded).parent
        tops = {name for name in sys.modules if "." not in name}
        gone = {top for top in tops if Path(getattr(sys.modules[top], "__file__", None) or "") in _files(former, top)}
        for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
            del sys.modules[name]
    if sys.path[:1] != [str(root)]:
        sys.path[:] = [str(root), *(entry for entry in sys.path if entry != str(root))]


def _files(folder: Path, module: str) -> tuple[Path, Path]:
    """The two files that a module of this name can have."""
    return folder / f"{module}.py", folder / module / "__init__.py"


def _attribute(path: str, *, kind: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            # The module exists; one of its imports does not.
            hint = INSTALL.get(error.name, f"pip install {error.name}")
            raise UserError(f"`{module_name}` needs `{error.name}`, which is not installed", hint=hint) from error
        raise UserError(
            f"no module `{module_name}` for {kind} `{path}`", hint="is it installed, or beside the recipe?"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise UserError(
            f"`{module_name}` has no `{attribute}` ({kind} `{path}`)", hint="check the name after the colon"
        ) from error
