"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from agent import SYSTEM
from demonstrations import Demonstration, demonstrations
from house import TOOLS

from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import add_phrases, build_model, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers, imitate, imitator

VOCABULARY = 420
BEGIN = "<|im_start|>assistant\n"
PHRASES = (
    BEGIN,
    '<tool_call>\n{"name": "',
    '", "arguments": {"',
    '": "',
    "}}\n</tool_call>",
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
)
"""What every conversation has, one token each: so an answer is some nine tokens long."""


def tokenizer_for(texts: list[str]) -> Any:
    """Knows every word of `texts` and every phrase. The tools' description is one, too."""
    tokenizer = build_tokenizer(texts, vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=SYSTEM)))
    return tokenizer


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it."""
    ids: list[int] = tokenizer.apply_chat_template(list(demonstration.messages), tools=TOOLS, return_dict=False)
    return answers(ids, begin=tokenizer.convert_tokens_to_ids(BEGIN), end=tokenizer.eos_token_id)


def text_of(message: dict[str, Any]) -> str:
    """An answer as the model writes it."""
    if not message.get("tool_calls"):
        return message["content"]
    function = message["tool_calls"][0]["function"]
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'


def main() -> None:
    arguments = parser().parse_args()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    shown = demonstrations(seed=arguments.seed, count=arguments.demonstrations, perfect=arguments.perfect)
    words = [message.get("content") or text_of(message) for d in shown[:2000] for message in d.messages]
    tokenizer = tokenizer_for([*words, *(json.dumps(tool) for tool in TOOLS), "system user assistant"])
    model = build_model(len(tokenizer), seed=arguments.seed, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    trainer = imitator(model, tokenizer=tokenizer, threads=arguments.threads)
    conversations = [examples(demonstration, tokenizer) for demonstration in shown]
    for _, loss in imitate(trainer, conversations, peak=arguments.peak, steps=arguments.steps, size=arguments.batch, seed=arguments.seed):
        print(f"loss {loss:.3f}", flush=True)
    trainer.publish(arguments.out)
    print(f"{sum(p.numel() for p in model.hf.parameters()):,} parameters, {len(tokenizer)} tokens, in {arguments.out}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--batch", type=int, default=24, help="conversations in a step")
    made.add_argument("--peak", type=float, default=3e-3, help="the highest learning rate")
    made.add_argument("--demonstrations", type=int, default=4000)
    made.add_argument("--perfect", action="store_true", help="leave the slips out: what the model could learn at best")
    made.add_argument("--threads", type=int, default=1, help="with 1, weights are the same bit for bit on any number of cores")
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "warmstart")
    return made


if __name__ == "__main__":
    main()
