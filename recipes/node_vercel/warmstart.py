"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from demonstrations import INSTRUCTIONS, TOOLS, Demonstration, demonstrations
from tasks import NUMBERS

from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import add_phrases, build_model, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers, imitate, imitator

VOCABULARY = 420
BEGIN = "<|im_start|>assistant\n"
PHRASES = (
    BEGIN,
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    '<tool_call>\n{"name": "look_up", "arguments": {"name": "',
    '"}}\n</tool_call>',
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
    *NUMBERS,
    *(f" {number}" for number in NUMBERS),
)
"""What every conversation has, and every number, one token each: so an answer is two to five tokens long."""


def tokenizer_for(demonstrated: list[Demonstration]) -> Any:
    """Knows every word of the demonstrations and every phrase. The tool's description is one, too."""
    texts = [text_of(message) for demonstration in demonstrated for message in demonstration.messages]
    tokenizer = build_tokenizer(texts, vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=INSTRUCTIONS)))
    return tokenizer


def text_of(message: dict[str, Any]) -> str:
    return message.get("content") or message["tool_calls"][0]["function"]["arguments"]


def ids_of(messages: list[dict[str, Any]], tokenizer: Any, *, go_on: bool = False) -> list[int]:
    """A conversation as the model reads it; with `go_on`, up to where it is to answer."""
    return tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=go_on, return_dict=False)


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it."""
    ids = ids_of(list(demonstration.messages), tokenizer)
    return answers(ids, begin=tokenizer.convert_tokens_to_ids(BEGIN), end=tokenizer.eos_token_id)


def main() -> None:
    arguments = parser().parse_args()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    shown = demonstrations(seed=arguments.seed, count=arguments.demonstrations, perfect=arguments.perfect)
    tokenizer = tokenizer_for(shown[:2000])
    size = {"hidden": 80, "layers": 3, "head_size": 20, "intermediate": 224}
    model = build_model(len(tokenizer), seed=arguments.seed, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **size)
    trainer = imitator(model, tokenizer=tokenizer, threads=arguments.threads)
    conversations = [examples(demonstration, tokenizer) for demonstration in shown]
    for step, loss in imitate(trainer, conversations, peak=arguments.peak, steps=arguments.steps, size=arguments.batch, seed=arguments.seed):
        print(f"step {step}  loss {loss:.3f}", flush=True)
    trainer.publish(arguments.out)
    print(f"{sum(p.numel() for p in model.hf.parameters()):,} parameters, {len(tokenizer)} tokens, in {arguments.out}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--steps", type=int, default=800)
    made.add_argument("--batch", type=int, default=32, help="conversations in a step")
    made.add_argument("--peak", type=float, default=4e-3, help="the highest learning rate")
    made.add_argument("--demonstrations", type=int, default=6000)
    made.add_argument("--perfect", action="store_true", help="leave the slips out: what the model could learn at best")
    made.add_argument("--threads", type=int, default=1, help="with 1, weights are the same bit for bit on any number of cores")
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "warmstart")
    return made


if __name__ == "__main__":
    main()
