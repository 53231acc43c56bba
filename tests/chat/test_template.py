"""Is a conversation rendered as `transformers` renders it, and does every id come back as text?"""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer

from lightningrl.chat import ChatTemplate, Message, ToolCall
from lightningrl.chat.messages import for_template
from lightningrl.chat.template import BadConversation
from lightningrl.errors import UserError

TOOL = {"type": "function", "function": {"name": "add", "description": "größer & <more>", "parameters": {"b": 1, "a": 2}}}
CALLED = Message(role="assistant", content="wait", tool_calls=(ToolCall(id="c1", name="add", arguments='{"x": [1, null, "ä"]}'),))
TALK = [
    Message(role="system", content="be brief"),
    Message(role="user", content="1 + 1 ?"),
    CALLED,
    Message(role="tool", content="2", tool_call_id="c1"),
    Message(role="assistant", content="two €"),
    Message(role="user", content="thanks"),
]

LLAMA_LIKE = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ['user', 'assistant', 'system'] %}{{ raise_exception('no ' + message.role) }}{% endif -%}
<|im_start|>{{ message.role }}

{% generation %}{{ message.content | trim }}{% endgeneration %}<|im_end|>
{%- if loop.index0 == 7 %}{% break %}{% endif -%}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""


@pytest.fixture(scope="session")
def template(model_folder: Path) -> ChatTemplate:
    return ChatTemplate.load(model_folder)


def folder_with(model_folder: Path, tmp_path: Path, template: str, **config: object) -> Path:
    folder = tmp_path / "other"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(template)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **config}))
    return folder


def text_of_transformers(folder: Path, messages: Sequence[Message], **options: object) -> str:
    turns = [for_template(message) for message in messages]
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, tokenize=False, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("tools", [[], [TOOL]])
@pytest.mark.parametrize("open_turn", [False, True])
def test_a_conversation_is_rendered_as_transformers_does(model_folder: Path, template: ChatTemplate, tools: list[dict], open_turn: bool) -> None:
    for length in range(1, len(TALK) + 1):
        theirs = text_of_transformers(model_folder, TALK[:length], tools=tools or None, add_generation_prompt=open_turn)
        assert template.text(TALK[:length], tools=tools, open_turn=open_turn) == theirs
        assert template.encode(theirs) == AutoTokenizer.from_pretrained(model_folder)(theirs, add_special_tokens=False)["input_ids"]


def test_template_dialect_of_the_hub_is_understood(model_folder: Path, tmp_path: Path) -> None:
    folder = folder_with(model_folder, tmp_path, LLAMA_LIKE, bos_token="<|endoftext|>")
    template = ChatTemplate.load(folder)
    plain = [message for message in TALK if message.role != "tool"]
    assert template.text(plain) == text_of_transformers(folder, plain, add_generation_prompt=True)
    with pytest.raises(BadConversation, match="no tool"):
        template.text(TALK)


def test_the_turn_end_is_found(template: ChatTemplate, model_folder: Path, tmp_path: Path) -> None:
    assert template.turn_end == "<|im_end|>"
    assert template.stop_token_ids == (template.turn_end_id,)
    bare = ChatTemplate.load(folder_with(model_folder, tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"))
    assert bare.turn_end_id is None
    assert bare.stop_token_ids == template.stop_token_ids  # the tokenizer's own end


def test_a_folder_that_cannot_chat_is_refused_with_a_hint(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"no chat template\nhint: use an instruction-tuned model"):
        ChatTemplate.load(folder)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="chat template cannot render"):
        ChatTemplate.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        ChatTemplate.load(folder)


def _sentencepiece_like() -> Tokenizer:
    """A tokenizer whose decoder drops the first space and spells unknown characters as bytes, as Llama 2 and Mistral do."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    special = ["<unk>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(["the quick brown fox"] * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


def test_pieces_of_a_stream_join_to_the_whole_and_hold_no_half_character(template: ChatTemplate) -> None:
    turns = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    chance = random.Random(0)
    for tokenizer, lowest in ((template, 0), (ChatTemplate(_sentencepiece_like(), turns, special={}), 258)):  # 2–257 are single bytes
        for _ in range(300):
            text = tokenizer.encode("the 🦊 fox — naïve €") if chance.random() < 0.5 else []
            ids = [*text, *(chance.randrange(lowest, 290) for _ in range(chance.randrange(12)))]
            stream, pieces, place = tokenizer.detokenizer(), [], 0
            while place < len(ids):
                step = chance.randint(1, 3)
                pieces.append(stream.feed(ids[place : place + step]))
                place += step
                assert not pieces[-1].endswith("\ufffd")
            assert "".join([*pieces, stream.flush()]) == tokenizer.decode(ids)


def test_a_stream_waits_only_for_the_character_at_hand(template: ChatTemplate) -> None:
    fox = template.encode("🦊")
    assert len(fox) == 4
    stream = template.detokenizer()
    assert [stream.feed([token]) for token in [*template.encode("a"), *fox, *template.encode("b")]] == ["a", "", "", "", "🦊", "b"]


def test_chat_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, lightningrl.gateway, lightningrl.chat; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
