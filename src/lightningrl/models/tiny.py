"""Build a Qwen3 of under a million parameters and its tokenizer from scratch.

texts → `build_tokenizer` → `build_model` → `write_model_folder`: an ordinary Hugging Face folder.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lightningrl.errors import UserError
from lightningrl.models.dense import DenseModel
from lightningrl.models.load import export_folder

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens: `skip_special_tokens` removes them from text."""
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens that stay in the text, for the parser of tool calls."""

PIECES = {
    "joined": r" ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]|\s",
    "apart": r"[\p{L}_]+|\p{N}|[^\s\p{L}\p{N}_]|\s",
}
WORD = re.compile(r"[^\W\d]+")

BEGIN = "<|im_start|>assistant\n"
"""Start of an assistant's turn. As a single token (a phrase) it marks where a conversation's answers begin."""

CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- elif content is not none -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set system = messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if system -%}{{- text(messages[0].content) + '\n\n' -}}{%- endif -%}
    {{- '# Tools\n\nYou may call functions. They are described within <tools></tools>:\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
    {{- '\n</tools>\n\nCall a function with a JSON object within <tool_call></tool_call>:\n<tool_call>\n' -}}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- elif system -%}
    {{- '<|im_start|>system\n' + text(messages[0].content) + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\n<tool_response>\n' + text(message.content) + '\n</tool_response><|im_end|>\n' -}}
    {%- elif not (loop.first and system) -%}
        {{- '<|im_start|>' + message.role + '\n' + text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function if call.function else call -%}
            {%- if not loop.first or message.content -%}{{- '\n' -}}{%- endif -%}
            {{- '<tool_call>\n{"name": ' + call.name | tojson + ', "arguments": ' -}}
            {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()
"""Qwen3's ChatML with Hermes tool calls, with three changes: no default system prompt and no thinking, the assistant's
text is rendered unchanged, and each tool result is a turn of its own. So a longer conversation renders to an extension
of the shorter one, token for token.
"""


def build_tokenizer(texts: Iterable[str], *, vocab_size: int, spaces: Literal["joined", "apart"] = "joined") -> Any:
    """Train a byte-level BPE on `texts` and wrap it for `transformers`. Lossless on any text.

    A piece is a word (letters and `_`), a digit, another sign, or a white space; merges never cross pieces. With
    `joined` spaces, a space belongs to the word or sign after it: `Paris` and ` Paris` are two tokens, and texts are
    shorter. With spaces `apart`, a word is the same token everywhere, which makes it easier to copy (into quotes, for
    example). Each word of the texts is one token if `vocab_size` has room. The vocabulary is smaller than `vocab_size`
    if the texts run out of merges.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    split = pre_tokenizers.Split(Regex(PIECES[spaces]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKUP),
        min_frequency=1,
        show_progress=False,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    corpus = list(texts)
    tokenizer.train_from_iterator([*corpus, *_every_form(corpus, spaced=spaces == "joined")], trainer)
    add_phrases(tokenizer, MARKUP)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def add_phrases(tokenizer: Any, phrases: Iterable[str]) -> None:
    """Make each phrase a single token that stays in the text."""
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])


def tools_phrase(tokenizer: Any, tools: Sequence[Any], *, system: str) -> str:
    """The chat template's text about `tools` after the system prompt: the same in all conversations of an agent."""
    described = tokenizer.apply_chat_template(
        [{"role": "system", "content": system}], tools=list(tools), tokenize=False
    )
    return described.removesuffix("<|im_end|>\n").partition(system)[2]


def _every_form(corpus: list[str], *, spaced: bool) -> list[str]:
    """Each word as often as it occurs, bare and (if `spaced`) after a space, so that both forms get merges."""
    counts = Counter(word for text in corpus for word in WORD.findall(text))
    bare = ["\n".join([word] * count) for word, count in counts.items()]
    return [*bare, *("".join([f" {word}"] * count) for word, count in counts.items())] if spaced else bare


def build_model(
    vocab_size: int,
    *,
    hidden: int = 96,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 24,
    intermediate: int = 256,
    max_length: int = 4096,
    seed: int = 0,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> DenseModel:
    """A Qwen3 with random weights. The same seed gives the same weights; torch's global generator is left as it was."""
    if heads % kv_heads or head_size % 2:
        raise UserError(
            f"`{heads}` heads of size `{head_size}` over `{kv_heads}` key/value heads",
            hint="heads divide evenly; sizes are even",
        )
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        intermediate_size=intermediate,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        initializer_range=hidden**-0.5,  # at the default 0.02 it does not learn to copy in 400 steps: loss 0.97 v. 0.56
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DenseModel(Qwen3ForCausalLM(config).eval())


def write_model_folder(path: Path, *, texts: Iterable[str], vocab_size: int = 1300, seed: int = 0) -> None:
    """Write a tokenizer trained on `texts`, and a model with random weights, as a Hugging Face folder."""
    tokenizer = build_tokenizer(texts, vocab_size=vocab_size)
    model = build_model(
        len(tokenizer), seed=seed, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    export_folder(model, path, tokenizer=tokenizer)
