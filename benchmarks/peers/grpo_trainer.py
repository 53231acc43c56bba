"""TRL's side of benchmarks/trl.py: one optimizer step of its `GRPOTrainer` on given rows. Runs in TRL's environment.

Everything is TRL's own, at its defaults (gradient checkpointing, loss `dapo`, no KL, AdamW, fused LM head), but for

- generation: the rows are given, as if they had been sampled just now;
- the LM head: TRL computes every position of a row on a CPU, and only sampled tokens on a GPU. Here it does the latter.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl.trainer.utils
from datasets import Dataset
from peak import Step
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP = 8


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["threads"])
    trl.trainer.utils._use_triton = lambda device: True  # read for `compact` alone; the kernels have their own name
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    if given["adapter"]:
        model = PeftModel.from_pretrained(model, given["adapter"], is_trainable=True)
    rows = given["rows"]
    accumulate = len(rows) // given["batch"]
    measure = Measure()
    trainer = Given(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=given["out"],
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=given["batch"],
            gradient_accumulation_steps=accumulate,
            num_generations=GROUP,
            max_steps=1,
            learning_rate=1e-5,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * (len(rows) // GROUP)),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        callbacks=[measure],
    )
    measure.trainer = trainer
    trainer.given, trainer.found, trainer.out, trainer.accumulate = rows, {}, Path(given["out"]), accumulate
    trainer.train()
    (trainer.out / "found.json").write_text(json.dumps(trainer.found))


class Measure(TrainerCallback):
    """Measures from the begin of the step to its end."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for p in self.trainer.model.parameters():  # weights come from a mapped file: read it before the step
            p.sum()
        self.trainer.step = Step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = self.trainer.step
        self.trainer.found |= step.seconds() | {"peak_of_step": step.peak(), "rss_before": step.rss_before}


class Given(GRPOTrainer):
    """A `GRPOTrainer` whose rows are given."""

    given: list[dict[str, Any]]
    out: Path
    accumulate: int
    step: Step
    found: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        rows = self.given

        def padded(name: str, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
            width = max(len(row[name]) for row in rows)
            ids = torch.full((len(rows), width), self._tokenizer.pad_token_id)
            mask = torch.zeros(len(rows), width, dtype=torch.long)
            for i, row in enumerate(rows):
                n = len(row[name])
                where = slice(width - n, width) if left else slice(0, n)
                ids[i, where], mask[i, where] = torch.tensor(row[name]), 1
            return ids, mask

        prompt_ids, prompt_mask = padded("prompt_ids", left=True)
        completion_ids, completion_mask = padded("completion_ids", left=False)
        tool_mask, _ = padded("sampled", left=False)
        tool_mask = tool_mask * completion_mask
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "tool_mask": tool_mask,
            "advantages": torch.tensor([row["advantage"] for row in rows]),
            "num_items_in_batch": tool_mask.sum(),
        }

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self._step % self.accumulate == 0:
            step = self.step
            step.pause()
            self.found["peak"] = step.peak()
            for name, p in self.model.named_parameters():
                if p.grad is not None:
                    p.grad.numpy().tofile(
                        self.out / f"{name.replace('base_model.model.', '').replace('.default', '')}.bin"
                    )
            step.resume()
        return loss


if __name__ == "__main__":
    main()
