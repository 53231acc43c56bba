"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from agent import SYSTEM
from demonstrations import TOOLS, Demonstration, demonstrations

from lightningrl.models.load import load_model, load_tokenizer
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import add_phrases, build_model, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers, imitate, imitator

VOCABULARY = 560
PEAK_AGAIN = 1e-3
"""The highest learning rate for a model that was trained before."""
BEGIN = "<|im_start|>assistant\n"
PHRASES = (
    BEGIN,
    "<|im_start|>user\n",
    "<|im_start|>system\n",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "',
    '"}}\n</tool_call>',
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
    *(f" {sign} " for sign in "+-*/"),
)
"""What every conversation has, one token each: so an answer is some eight tokens long."""
NUMBERS = tuple(f"{number:02d}" for number in range(100))
"""Two digits are one token, the same in a story, in a call and in a result; never with the space before. So a number of a story is copied in one
look, and a result below 10,000 in two. Of single digits every second one would have to be found again by what was written before it, which is
not enough where 37 and 34 are in one story; of whole numbers each would be too rare to be learnt."""


def tokenizer_for(texts: list[str]) -> Any:
    """Knows every word of `texts`, every phrase and two digits at a time. What is to be done, and what with, is a phrase each, too."""
    tokenizer = build_tokenizer(texts, vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, *NUMBERS, SYSTEM, tools_phrase(tokenizer, TOOLS, system=SYSTEM)))
    return tokenizer


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it. Who reflects is shown no tools."""
    begin, end = tokenizer.convert_tokens_to_ids(BEGIN), tokenizer.eos_token_id

    def shown(tools: list[dict[str, Any]] | None) -> list[Example]:
        ids: list[int] = tokenizer.apply_chat_template(list(demonstration.messages), tools=tools, return_dict=False)
        return answers(ids, begin=begin, end=end)

    made = shown(TOOLS)
    return [*made[:-1], shown(None)[-1]] if demonstration.reflects else made


def text_of(message: dict[str, Any]) -> str:
    """What is said, or asked of the calculator."""
    return message.get("content") or json.loads(message["tool_calls"][0]["function"]["arguments"])["expression"]


def main() -> None:
    arguments = parser().parse_args()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    made = demonstrations(seed=arguments.seed, count=arguments.demonstrations, perfect=arguments.perfect)
    if arguments.base is None:
        tokenizer = tokenizer_for([*(text_of(message) for d in made[:2000] for message in d.messages), json.dumps(TOOLS), "system user assistant"])
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        model = build_model(len(tokenizer), seed=arguments.seed, layers=4, **ids)
    else:
        tokenizer, model = load_tokenizer(str(arguments.base)), load_model(str(arguments.base))
    trainer = imitator(model, tokenizer=tokenizer, threads=arguments.threads)
    conversations = [examples(demonstration, tokenizer) for demonstration in made]
    peak = arguments.peak if arguments.base is None else PEAK_AGAIN
    settings = {
        "steps": arguments.steps,
        "seconds": arguments.seconds,
        "size": arguments.batch,
        "seed": arguments.seed if arguments.order is None else arguments.order,
    }
    for step, loss in imitate(trainer, conversations, peak=peak, **settings):
        print(f"step {step}  loss {loss:.3f}", flush=True)
    trainer.publish(arguments.out)
    print(f"{sum(p.numel() for p in model.hf.parameters()):,} parameters, {len(tokenizer)} tokens, in {arguments.out}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--order", type=int, help="seed of the order in which demonstrations come; default: --seed")
    made.add_argument("--steps", type=int, default=1400)
    made.add_argument("--seconds", type=float, default=math.inf, help="stop after this much time")
    made.add_argument("--batch", type=int, default=48, help="conversations in a step")
    made.add_argument("--peak", type=float, default=3e-3, help="the highest learning rate")
    made.add_argument("--demonstrations", type=int, default=12000)
    made.add_argument("--perfect", action="store_true", help="leave the slips out: what the model could learn at best")
    made.add_argument("--continue", dest="base", type=Path, help="go on from a model folder: the control that reinforcement learning is held against")
    made.add_argument("--threads", type=int, default=1, help="with 1, weights are the same bit for bit on any number of cores")
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "warmstart")
    return made


if __name__ == "__main__":
    main()
