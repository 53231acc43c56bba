"""TRL's answers: its own trainers on the batch, with a tiny model. Two of their methods are replaced: generation
returns the batch's rollouts, and the model's logprobs are the batch's. Everything between (rewards → advantages,
corrections, loss) is TRL's code.

Legend: R rollouts (rows) · T positions of a row · M sampled tokens, row by row.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from batch import T, row_mask, rows
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

GROUP = 4
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
    "dapo, delta": {"loss_type": "dapo", "delta": 3.0},
    "dapo, kl": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
    "dapo, kl with ratio": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
    "dapo, entropy": {"loss_type": "dapo", "entropy_coef": 0.05},
    "grpo, entropy": {"loss_type": "grpo", "entropy_coef": 0.05},
}
CORRECTIONS = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
SCALES: dict[str, dict[str, Any]] = {
    "group": {"scale_rewards": "group"},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
}


class Given:
    """Mixin for a trainer that replaces the model's outputs."""

    given: dict[str, Tensor]
    """[R T] by name; `mask` marks sampled positions."""
    asked_for: str = "old"
    gaps: bool = True
    """Whether the trainer supports unsampled positions within a row."""

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        n, mask = len(prompts), self.given["mask"][: len(prompts)]
        ends = [int(row.nonzero().max()) + 1 for row in mask]
        completions = [[1] * end for end in ends]
        if not self.gaps:
            return [[2]] * n, completions, ["x"] * n
        gaps = [row[:end].long().tolist() for row, end in zip(mask, ends, strict=True)]
        sampled = [row[:end].tolist() for row, end in zip(self.given["behaviour"][:n], ends, strict=True)]
        return [[2]] * n, completions, gaps, ["x"] * n, sampled, {}, None, None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        name = "reference" if model is not None and model is getattr(self, "ref_model", None) else self.asked_for
        n, width = len(input_ids), input_ids.shape[1] - 1
        return self.given[name][:n, :width], self.given["entropies"][:n, :width], None


class GivenGRPO(Given, GRPOTrainer): ...


class GivenRLOO(Given, RLOOTrainer):
    gaps = False


def answers(batch: dict[str, Any]) -> dict[str, Any]:
    table = {
        name: torch.tensor(rows(batch[name]))
        for name in ("old", "new", "behaviour", "reference", "entropies", "advantages_of_calls")
    }
    table["mask"] = torch.tensor(row_mask())
    whole = len(batch["groups"]) // GROUP * GROUP  # every group of TRL's has the same size
    with _tiny_model() as model:
        return {
            "rollouts": whole,
            "advantages": {
                **{f"grpo, {name}": _grpo(model, batch, table, **given)[0] for name, given in SCALES.items()},
                "rloo": _rloo(model, batch, table)[0],
                "rloo, normalized": _rloo(model, batch, table, normalize_advantages=True)[0],
            },
            "losses": {
                **{name: _grpo(model, batch, table, **given)[1] for name, given in LOSSES.items()},
                "gspo, advantages of calls": _grpo(model, batch, table, of_calls=True, **LOSSES["gspo"])[1],
                "rloo": _rloo(model, batch, table)[1],
            },
            "correction": {
                mode: _grpo(model, batch, table, correction=mode, loss_type="dapo")[1] for mode in CORRECTIONS
            },
        }


def _grpo(
    model: str,
    batch: dict[str, Any],
    table: dict[str, Tensor],
    *,
    correction: str | None = None,
    of_calls: bool = False,
    **settings: Any,
) -> tuple[Any, Any]:
    """([R] advantages from the rewards, loss and gradient for the batch's own advantages)"""
    more = {"vllm_importance_sampling_mode": correction, "vllm_importance_sampling_clip_max": 2.0} if correction else {}
    config = GRPOConfig(**_common(model, batch), **{"beta": 0.0, "epsilon_high": 0.28, **settings}, **more)
    trainer = GivenGRPO(model=model, reward_funcs=_reward, args=config, train_dataset=_dataset(batch))
    trainer.use_vllm = correction is not None  # affects only its corrections; it does not generate with vLLM
    return _ask(trainer, batch, table, of_calls=of_calls)


def _rloo(model: str, batch: dict[str, Any], table: dict[str, Tensor], **settings: Any) -> tuple[Any, Any]:
    """For a trainer without gaps between calls: the sampled tokens of each row are moved together."""
    order = torch.argsort(table["mask"], dim=1, descending=True, stable=True)
    pushed = {name: value.gather(1, order) for name, value in table.items()}
    config = RLOOConfig(**_common(model, batch), **{"beta": 0.0, "epsilon": 0.2, **settings})
    trainer = GivenRLOO(model=model, reward_funcs=_reward, args=config, train_dataset=_dataset(batch))
    return _ask(trainer, batch, pushed)


def _ask(trainer: Any, batch: dict[str, Any], table: dict[str, Tensor], *, of_calls: bool = False) -> tuple[Any, Any]:
    n = len(_dataset(batch))
    trainer.given = {**table, "new": table["new"].clone().requires_grad_()}
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions(list(_dataset(batch)))
    advantages = inputs["advantages"].tolist()
    width = inputs["completion_ids"].shape[1]
    inputs.setdefault("old_per_token_logps", table["old"][:n, :width])
    inputs["advantages"] = (
        table["advantages_of_calls"][:n, :width]
        if of_calls
        else torch.tensor(batch["advantages"][:n], dtype=torch.float64)
    )
    trainer.asked_for = "new"
    loss = trainer.compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, trainer.given["new"])
    return advantages, {"loss": float(loss.detach()), "gradient": gradient[:n][table["mask"][:n] == 1].tolist()}


def _common(model: str, batch: dict[str, Any]) -> dict[str, Any]:
    n = len(_dataset(batch))
    return {
        "output_dir": str(Path(model) / "out"),
        "per_device_train_batch_size": n,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "max_completion_length": T,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "logging_strategy": "no",
    }


def _dataset(batch: dict[str, Any]) -> Dataset:
    whole = len(batch["groups"]) // GROUP * GROUP
    return Dataset.from_list([{"prompt": "x", "worth": worth} for worth in batch["rewards"][:whole]])


def _reward(*, worth: list[float], **_: Any) -> list[float]:
    return worth


@contextmanager
def _tiny_model() -> Iterator[str]:
    """A folder to make trainers from. The model in it is never called."""
    with tempfile.TemporaryDirectory() as folder:
        words = Tokenizer(WordLevel({"<eos>": 0, "x": 1, "y": 2, "<unk>": 3}, unk_token="<unk>"))
        PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
        ).save_pretrained(folder)
        sizes = GPT2Config(vocab_size=4, n_positions=32, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
        GPT2LMHeadModel(sizes).save_pretrained(folder)
        yield folder
