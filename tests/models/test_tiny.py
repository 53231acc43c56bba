"""A tokenizer and a model built from scratch."""

from typing import Literal

import pytest
import torch

from lightningrl.models.tiny import build_model, build_tokenizer

TEXTS = ["SELECT name FROM city WHERE name = 'Paris' AND n > 12;", "Show the name of every city."]
CALL = {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"sql": "SELECT 1"}'}}
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
CONVERSATION = [
    {"role": "system", "content": "You write SQL."},
    {"role": "user", "content": [{"type": "text", "text": "How many?"}]},
    {"role": "assistant", "content": "  let me see  ", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
    {"role": "tool", "content": "4", "tool_call_id": "1"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "1"},
    {"role": "assistant", "content": "seven"},
]


@pytest.mark.parametrize("spaces", ["joined", "apart"])
@pytest.mark.parametrize(
    "text", ["SELECT 'Paris' in Paris 1234\n\n\t x_y é 漢 🙂", "", "  ", "<tool_call>{}</tool_call>"]
)
def test_the_tokenizer_is_lossless_on_any_text(spaces: Literal["joined", "apart"], text: str) -> None:
    tokenizer = build_tokenizer(TEXTS, vocab_size=500, spaces=spaces)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_known_word_is_one_token_wherever_it_stands() -> None:
    joined, apart = (build_tokenizer(TEXTS, vocab_size=500, spaces=s) for s in ("joined", "apart"))
    assert joined.tokenize("'Paris' Paris") == ["'", "Paris", "'", "ĠParis"]
    assert apart.tokenize("'Paris' Paris") == ["'", "Paris", "'", "Ġ", "Paris"]
    assert joined.tokenize("12") == ["1", "2"]


def test_control_tokens_are_hidden_and_markup_is_visible() -> None:
    tokenizer = build_tokenizer(TEXTS, vocab_size=500)
    ids = tokenizer.encode("<tool_call>Paris</tool_call><|im_end|>")
    assert len(ids) == 4
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>Paris</tool_call>"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_longer_conversation_extends_the_shorter_one(tools: list[dict[str, object]] | None) -> None:
    tokenizer = build_tokenizer(TEXTS, vocab_size=500)

    def render(count: int, *, prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            CONVERSATION[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    for count in range(1, len(CONVERSATION)):
        assert render(count + 1, prompt=False).startswith(render(count, prompt=False))
        if CONVERSATION[count]["role"] == "assistant":
            assert render(count + 1, prompt=False).startswith(render(count, prompt=True))


def test_the_template_adds_no_system_prompt_and_no_thinking() -> None:
    tokenizer = build_tokenizer(TEXTS, vocab_size=500)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    call = tokenizer.apply_chat_template(CONVERSATION[5:6], tokenize=False)
    body = '{"name": "run", "arguments": {"sql": "SELECT 1"}}'
    assert call == f"<|im_start|>assistant\n<tool_call>\n{body}\n</tool_call><|im_end|>\n"


def test_the_same_seed_builds_the_same_model_and_disturbs_no_generator() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    a, b, c = (build_model(300, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(a.hf.lm_head.weight, b.hf.lm_head.weight)
    assert not torch.equal(a.hf.lm_head.weight, c.hf.lm_head.weight)
    assert a.hf.lm_head.weight is a.hf.model.embed_tokens.weight
    assert abs(a.hf.lm_head.weight.std().item() * 96**0.5 - 1) < 0.05
