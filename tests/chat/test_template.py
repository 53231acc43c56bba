"""Are conversations rendered as `transformers` renders them, and ids decoded completely?"""

import contextlib
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightningrl.chat import ChatTemplate
from lightningrl.chat.template import BadConversation
from lightningrl.chat.turns import for_template
from lightningrl.errors import UserError
from lightningrl.messages import Message, ToolCall
from tests.chat.zookeeper import NAMES, chat_template, tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "größer & <more>", "parameters": {"b": 1, "a": 2}},
}
CALLED = Message(
    role="assistant", content="wait", tool_calls=(ToolCall(id="c1", name="add", arguments='{"x": [1, null, "ä"]}'),)
)
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
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.apply_chat_template(turns, tokenize=False, **options))


@pytest.mark.parametrize("tools", [[], [TOOL]])
@pytest.mark.parametrize("open_turn", [False, True])
def test_a_conversation_is_rendered_as_transformers_does(
    model_folder: Path, template: ChatTemplate, tools: list[dict], open_turn: bool
) -> None:
    for length in range(1, len(TALK) + 1):
        theirs = text_of_transformers(model_folder, TALK[:length], tools=tools or None, add_generation_prompt=open_turn)
        assert template.text(TALK[:length], tools=tools, open_turn=open_turn) == theirs
        assert (
            template.encode(theirs)
            == AutoTokenizer.from_pretrained(model_folder)(theirs, add_special_tokens=False)["input_ids"]
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_zoo_is_rendered_as_transformers_does(name: str) -> None:
    template = chat_template(name)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), **template._special)
    thought = Message(role="assistant", content=" two ", reasoning="hm")
    talks = [TALK, [TALK[1], thought, TALK[5]], [TALK[0], TALK[1], thought], [TALK[1], CALLED, TALK[3]], [TALK[1]]]
    compared = 0
    for talk in talks:
        for tools in ([], [TOOL]):
            for open_turn in (False, True):
                with contextlib.suppress(jinja2.TemplateError, TypeError):
                    turns = [for_template(message) for message in talk]
                    expected = theirs.apply_chat_template(
                        turns,
                        chat_template=template._source,
                        tools=list(tools) or None,
                        add_generation_prompt=open_turn,
                        tokenize=False,
                    )
                    assert template.text(talk, tools=tools, open_turn=open_turn) == expected
                    compared += 1
    assert compared >= 8


def test_template_dialect_of_the_hub_is_understood(model_folder: Path, tmp_path: Path) -> None:
    folder = folder_with(model_folder, tmp_path, LLAMA_LIKE, bos_token="<|endoftext|>")
    template = ChatTemplate.load(folder)
    plain = [message for message in TALK if message.role != "tool" and not message.tool_calls]
    assert template.text(plain) == text_of_transformers(folder, plain, add_generation_prompt=True)
    with pytest.raises(BadConversation, match="no critic"):
        template.text([*plain, Message(role="critic", content="bad")])


def test_messages_that_a_template_refuses_are_put_in_a_form_that_it_accepts() -> None:
    late = [*TALK[:2], TALK[4], Message(role="developer", content="hurry"), TALK[5], TALK[5]]
    told = {"gemma": [*TALK[:4], *late[3:]], "mistral": late, "thinker": late, "phi": late}
    told = {
        name: chat_template(name).text(talk, open_turn=False).replace(chat_template(name).turn_end, "|")
        for name, talk in told.items()
    }
    assert told["gemma"] == (
        "<bos><start_of_turn>user\nbe brief\n\n1 + 1 ?|\n<start_of_turn>model\nwait\n<tool_call>\n"
        '{"name": "add", "arguments": {"x": [1, null, "ä"]}}\n</tool_call>|\n'
        "<start_of_turn>user\n<tool_response>\n2\n</tool_response>\n\nhurry\n\nthanks\n\nthanks|\n"
    )
    assert told["mistral"].endswith("two €|[INST] be brief\n\nhurry\n\nthanks\n\nthanks[/INST]")
    assert told["thinker"].startswith("<|begin_of_text|>be briefhurry<|user|>1 + 1 ?")
    assert "<|system|>\nhurry|" in told["phi"]


@pytest.mark.parametrize("greedy", [False, True])
def test_the_beginning_of_a_prompt_is_remembered_only_where_that_changes_nothing(greedy: bool) -> None:
    """If the end of a turn takes the white space before it, the text before it cannot be tokenised apart."""
    state = json.loads(tokenizer().to_str())
    state["added_tokens"] = [
        {**token, "lstrip": greedy and token["content"] == "<|im_end|>"} for token in state["added_tokens"]
    ]
    template = ChatTemplate(Tokenizer.from_str(json.dumps(state)), chat_template("chatml")._source, special={})
    talk = [Message(role="system", content="be brief " * 100 + "   "), *TALK[1:]]
    assert template._cuts != greedy
    for _ in range(2):
        assert template.render(talk) == template.encode(template.opened(talk))


def test_content_comes_in_parts_where_a_template_wants_parts() -> None:
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + parts + "<|im_end|>\n{% endfor %}"
    template = ChatTemplate(tokenizer(), source, special={})
    assert template.text([TALK[1]]) == "<|im_start|>user\n1 + 1 ?<|im_end|>\n"
    assert template.turn_end == "<|im_end|>"


def test_arguments_are_text_where_a_template_joins_strings() -> None:
    """As DeepSeek's templates do."""
    source = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments + '!' }}{% endfor %}<|im_end|>{% endfor %}"
    )
    template = ChatTemplate(tokenizer(), source, special={})
    assert template.text([TALK[1], CALLED]) == '1 + 1 ?<|im_end|>waitcall {"x": [1, null, "ä"]}!<|im_end|>'


def test_the_turn_end_is_found(template: ChatTemplate, model_folder: Path, tmp_path: Path) -> None:
    assert template.turn_end == "<|im_end|>"
    assert template.stop_token_ids == (template.turn_end_id,)
    bare = ChatTemplate.load(
        folder_with(model_folder, tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    )
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
    """A tokenizer as in Llama 2 and Mistral: the decoder drops the first space, and unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)  # type: ignore[assignment]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    special = ["<unk>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        ["the quick brown fox"] * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


def test_pieces_of_a_stream_join_to_the_whole_and_hold_no_half_character(template: ChatTemplate) -> None:
    turns = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    rng = random.Random(0)
    for kind, lowest in (
        (template, 0),
        (ChatTemplate(_sentencepiece_like(), turns, special={}), 258),
    ):  # 2–257 are single bytes
        for _ in range(300):
            text = kind.encode("the 🦊 fox — naïve €") if rng.random() < 0.5 else []
            ids = [*text, *(rng.randrange(lowest, 290) for _ in range(rng.randrange(12)))]
            stream, pieces, place = kind.detokenizer(), [], 0
            while place < len(ids):
                step = rng.randint(1, 3)
                pieces.append(stream.feed(ids[place : place + step]))
                place += step
                assert not pieces[-1].endswith("\ufffd")
            assert "".join([*pieces, stream.flush()]) == kind.decode(ids)


def test_a_stream_waits_only_for_the_character_at_hand(template: ChatTemplate) -> None:
    fox = template.encode("🦊")
    assert len(fox) == 4
    stream = template.detokenizer()
    assert [stream.feed([token]) for token in [*template.encode("a"), *fox, *template.encode("b")]] == [
        "a",
        "",
        "",
        "",
        "🦊",
        "b",
    ]


def test_chat_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, lightningrl.gateway, lightningrl.chat; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
