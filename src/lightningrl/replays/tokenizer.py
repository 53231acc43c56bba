"""Where is the tokenizer with which a run's prompts were made? In the run's folder, or where its settings say."""

from pathlib import Path

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.gateway.scripted import PLAIN


def tokenizer_folder(config: Config, run: Path) -> Path:
    """The folder of the tokenizer and chat template: the run's own copy, else that of the recipe's model.

    `run`: the run's folder. Nothing is downloaded. Raises `UserError` if there is none.
    """
    named = Path(config.model.path).expanduser()
    if named.parts[-3:] == PLAIN.parts[-3:]:  # the package may have been at another place
        return PLAIN
    copies = [run / "model", *sorted((run / "model").glob("*")), *sorted((run / "checkpoints").glob("step-*/**"))]
    for folder in (*copies, config.root / named, *_downloaded(config.model.path)):
        if (folder / "tokenizer.json").is_file():
            return folder
    if all(route.policy.startswith("upstreams.") for route in config.routes):
        return PLAIN  # relayed calls have no prompt ids
    files = "the tokenizer.json, tokenizer_config.json and chat_template.jinja of the model"
    hint = f"copy {files} to `{run / 'model'}`"
    raise UserError(f"the tokenizer of `{run}` is missing: `{config.model.path}` has none", hint=hint)


def _downloaded(model: str) -> list[Path]:
    """The model's folder in the cache of the hub; empty: it is not there."""
    from huggingface_hub import snapshot_download

    try:
        return [Path(snapshot_download(model, local_files_only=True))]
    except (OSError, ValueError):  # no id of a model, or nothing of it is in the cache
        return []
