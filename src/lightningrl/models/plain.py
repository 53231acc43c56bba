"""Log-probabilities by Hugging Face's own code: an independent reference to test engines and trainers against."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from lightningrl.types import Doubles, Ints


@torch.no_grad()
def plain_logprobs(folder: Path, completions: Iterable[tuple[Ints, Ints, float]]) -> list[Doubles]:
    """[C] for each (prompt [P], completion [C], temperature): the log-probability of each completion token in nats,
    computed in float32, one sequence at a time.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logprobs_of: list[Doubles] = []
    for prompt, completion, temperature in completions:
        ids = torch.from_numpy(np.concatenate((prompt, completion)).astype(np.int64))
        logprobs = (model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        logprobs_of.append(logprobs.gather(-1, ids[len(prompt) :, None])[:, 0].double().numpy())
    return logprobs_of
