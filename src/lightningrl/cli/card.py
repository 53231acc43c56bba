"""The model card of an exported model: its base, its training, its results, and how to serve it.

It has only what may be published: no path of this machine, no server address, no environment of the agent.
"""

import json
from pathlib import Path

import tomli_w

import lightningrl
from lightningrl.cli.report import Result
from lightningrl.cli.verdict import signed
from lightningrl.config import Config, LearnerConfig

BASE = "path/to/base"
"""Stands for a base model that is a local folder."""
RANKS = (8, 16, 32, 64)
"""Usual values of vLLM's `--max-lora-rank` (docs/engines.md)."""


def write_cards(folder: Path, config: Config, result: Result) -> None:
    """Write a `README.md` beside the weights of each policy."""
    learners = config.learners()
    for name, learner in learners.items():
        own = folder / name if len(learners) > 1 else folder
        title = f"{config.name}: {name}" if len(learners) > 1 else config.name
        (own / "README.md").write_text(model_card(title, config, learner, result), encoding="utf-8")


def model_card(title: str, config: Config, learner: LearnerConfig, result: Result) -> str:
    """The card in Markdown, after YAML that the Hugging Face Hub reads."""
    base = None if (config.root / Path(learner.model.path).expanduser()).is_dir() else learner.model.path
    start = f"[{base}](https://huggingface.co/{base})" if base else "a model that is not on the Hub"
    lora = learner.model.lora_rank > 0
    return "\n\n".join(
        [
            _front_matter(base, lora=lora),
            f"# {title}",
            f"Trained by reinforcement learning inside an agent, from {start}, "
            f"with LightningRL {lightningrl.__version__}.",
            _figures(result),
            _settings(config, learner),
            _serving(title.replace(": ", "-").replace(" ", "-").lower(), base or BASE, learner),
        ]
    )


def _front_matter(base: str | None, *, lora: bool) -> str:
    lines: list[str] = []
    if base:  # a JSON string is also a YAML string
        lines = [f"base_model: {json.dumps(base)}", f"base_model_relation: {'adapter' if lora else 'finetune'}"]
    lines += [f"library_name: {'peft' if lora else 'transformers'}", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {tag}" for tag in ("lightningrl", "reinforcement-learning", "agent", *(("lora",) if lora else ()))]
    return "\n".join(["---", *lines, "---"])


def _figures(result: Result) -> str:
    sampled = f"{result.heldout_before:.3f} | {result.heldout_after:.3f}"
    return f"""## Reward on {result.heldout_tasks} held-out tasks
| | before | after | change, 95 % interval |
|---|---|---|---|
| sampled, temperature 1 | {sampled} | {signed(result.heldout_change)} |
| greedy | {result.heldout_greedy_before:.3f} | {result.heldout_greedy_after:.3f} | |

{result.steps} steps, {result.rollouts:,} rollouts including exams."""


def _settings(config: Config, learner: LearnerConfig) -> str:
    own = learner.model_dump(mode="json", include={"algorithm", "loss", "trainer"})
    model = learner.model.model_dump(mode="json", include={"dtype", "lora_rank"})
    tree = {"seed": config.seed, "model": model, **own, "loop": config.loop.model_dump(mode="json")}
    return f"## Settings\n```toml\n{tomli_w.dumps(tree).rstrip()}\n```"


def _serving(name: str, base: str, learner: LearnerConfig) -> str:
    rank = learner.model.lora_rank
    if rank:
        largest = next((known for known in RANKS if known >= rank), rank)
        vllm = f"vllm serve {base} --enable-lora --max-lora-rank {largest} --lora-modules {name}=."
        modelfile = f"FROM {base}\\nADAPTER .\\n"
    else:
        vllm = f"vllm serve . --served-model-name {name}"
        modelfile = "FROM .\\n"
    return f"""## Serve and share
In this folder:
```bash
# vLLM
{vllm}
# Ollama, for the model families in https://docs.ollama.com/import
printf '{modelfile}' > Modelfile && ollama create {name} && ollama run {name}
# Hugging Face Hub
hf upload YOUR-NAME/{name} . .
```
"""
