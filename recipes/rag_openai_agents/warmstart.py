"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from agent import INSTRUCTIONS
from demonstrations import Demonstration, demonstrations
from names import PARTS
from search import NOTHING, SCHEMA

from lightningrl.models.load import load_model, load_tokenizer
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import add_phrases, build_model, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers, imitate, imitator

VOCABULARY = 1200
PEAK_AGAIN = 1e-3
"""The highest learning rate for a model that was trained before."""
TOOLS = [{"type": "function", "function": {"name": "search", "description": "look up", "parameters": SCHEMA, "strict": False}}]
"""As the model is told of it, whichever way the agent comes by it."""
BEGIN = "<|im_start|>assistant\n"
PHRASES = (
    BEGIN,
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    '<tool_call>\n{"name": "search", "arguments": {"query": "',
    '"}}\n</tool_call>',
    "<|im_start|>user\n<tool_response>\n-",
    "\n</tool_response>",
    "\n-",
    "<answer>",
    " </answer>",
)
"""What every conversation has, one token each: so a search is some six tokens long, and what is found about 30."""


def tokenizer_for(texts: list[str]) -> Any:
    """Knows every word of `texts`, every part of a name and every phrase. The tool's description is one, too."""
    parts = [part for kind in PARTS.values() for both in kind for part in both.split()]
    tokenizer = build_tokenizer([*texts, *parts], vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=INSTRUCTIONS)))
    return tokenizer


def ids_of(messages: list[dict[str, Any]], tokenizer: Any, *, go_on: bool = False) -> list[int]:
    """A conversation as the model reads it; with `go_on`, up to where it is to answer."""
    return tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=go_on, return_dict=False)


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it."""
    ids = ids_of(list(demonstration.messages), tokenizer)
    return answers(ids, begin=tokenizer.convert_tokens_to_ids(BEGIN), end=tokenizer.eos_token_id)


def text_of(message: dict[str, Any]) -> str:
    return message.get("content") or message["tool_calls"][0]["function"]["arguments"]


def main() -> None:
    arguments = parser().parse_args()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    shown = demonstrations(seed=arguments.seed, count=arguments.demonstrations, perfect=arguments.perfect)
    if arguments.base is None:
        tokenizer = tokenizer_for([*(text_of(message) for d in shown[:3000] for message in d.messages), NOTHING])
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        model = build_model(len(tokenizer), hidden=arguments.hidden, layers=arguments.layers, seed=arguments.seed, **ids)
    else:
        tokenizer, model = load_tokenizer(str(arguments.base)), load_model(str(arguments.base))
    trainer = imitator(model, tokenizer=tokenizer, threads=arguments.threads)
    conversations = [examples(demonstration, tokenizer) for demonstration in shown]
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
    made.add_argument("--hidden", type=int, default=96, help="size of the model")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--demonstrations", type=int, default=16000)
    made.add_argument("--perfect", action="store_true", help="leave the mistakes out: what the model could learn at best")
    made.add_argument("--continue", dest="base", type=Path, help="go on from a model folder: the control that reinforcement learning is held against")
    made.add_argument("--threads", type=int, default=1, help="with 1, weights are the same bit for bit on any number of cores")
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "warmstart")
    return made


if __name__ == "__main__":
    main()
