"""One call to take along: as a curl command, as Python with the SDK of its API format, and as a test.

Nothing in a request can end a literal or run as code: curl reads the body from a quoted here-document, and Python
reads it as a literal. Characters that a terminal would obey are escaped.
"""

import json
import re
from base64 import b64decode
from binascii import Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pprint import pformat
from textwrap import indent
from typing import Any
from urllib.parse import quote

from lightningrl.messages import Message
from lightningrl.types import Call

WIDTH, INDENT = 100, "    "
"""Columns and indentation of the Python code."""
BYTES = ("thoughtSignature", "thought_signature")
"""Fields that Google's SDK takes as bytes; JSON has them in base64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """How requests of one API format are sent."""

    url: str
    """A URL for the shell, with a variable; `{model}` and `{verb}` stand for fields of the request."""
    headers: tuple[str, ...]
    imports: str
    client: str
    """A line of Python."""
    create: str
    """A function of `client`."""
    named: tuple[str, ...]
    """Arguments of that function in all versions of the SDK; other fields go into `extra_body`."""
    variables: str
    """Environment variables that curl and the SDK read."""
    text: str
    """The text of `answer`, in Python."""
    tools: str
    """(name, arguments as a dict) of the tool calls of `answer`, in Python."""


OPENAI = {
    "headers": ("Authorization: Bearer $OPENAI_API_KEY",),
    "imports": "from openai import OpenAI",
    "client": "client = OpenAI()",
    "variables": "OPENAI_BASE_URL and OPENAI_API_KEY",
}
SAMPLING = ("temperature", "top_p", "seed", "stop", "n")
APIS: Mapping[str, Api] = {
    "openai.chat": Api(
        **OPENAI,
        url="$OPENAI_BASE_URL/chat/completions",
        create="client.chat.completions.create",
        named=(
            *("model", "messages", "tools", "tool_choice", *SAMPLING, "max_tokens", "max_completion_tokens"),
            *("response_format", "logprobs", "top_logprobs", "parallel_tool_calls"),
        ),
        text='answer.choices[0].message.content or ""',
        tools="[(call.function.name, json.loads(call.function.arguments)) "
        "for call in answer.choices[0].message.tool_calls or []]",
    ),
    "openai.completions": Api(
        **OPENAI,
        url="$OPENAI_BASE_URL/completions",
        create="client.completions.create",
        named=("model", "prompt", "max_tokens", *SAMPLING, "logprobs", "echo", "suffix"),
        text="answer.choices[0].text",
        tools="[]",
    ),
    "openai.responses": Api(
        **OPENAI,
        url="$OPENAI_BASE_URL/responses",
        create="client.responses.create",
        named=(
            *("model", "input", "instructions", "tools", "tool_choice", "temperature", "top_p", "max_output_tokens"),
            *("text", "reasoning", "previous_response_id", "store", "include", "parallel_tool_calls"),
        ),
        text="answer.output_text",
        tools="[(item.name, json.loads(item.arguments)) for item in answer.output if item.type == 'function_call']",
    ),
    "anthropic.messages": Api(
        url="$ANTHROPIC_BASE_URL/v1/messages",
        headers=("x-api-key: $ANTHROPIC_API_KEY", "anthropic-version: 2023-06-01"),
        imports="from anthropic import Anthropic",
        client="client = Anthropic(timeout=600)",
        create="client.messages.create",
        named=("model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "thinking"),
        variables="ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY",
        text='"".join(block.text for block in answer.content if block.type == "text")',
        tools='[(block.name, block.input) for block in answer.content if block.type == "tool_use"]',
    ),
    "google.gemini": Api(
        url="$GOOGLE_GEMINI_BASE_URL/v1beta/models/{model}:{verb}",
        headers=("x-goog-api-key: $GEMINI_API_KEY",),
        imports="from google import genai",
        client="client = genai.Client()",
        create="client.models.generate_content",
        named=("model", "contents", "config"),
        variables="GOOGLE_GEMINI_BASE_URL and GEMINI_API_KEY",
        text='answer.text or ""',
        tools="[(call.name, call.args) for call in answer.function_calls or []]",
    ),
}
STREAMING = ("stream", "stream_options")
IN_PATH = ("model", "verb", "sse")
"""Fields that `google.gemini` records beside the body: they stand in the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The call as text to copy."""

    curl: str
    python: str
    test: str
    """A test for pytest. It asks what the call asked, and expects what is certain of a good answer: the same tools, or
    some text.
    """

    def as_json(self) -> dict[str, str]:
        return {"curl": self.curl, "python": self.python, "test": self.test}


def copies_of(call: Call, answer: Message | None) -> Copies | None:
    """`answer`: the one that was given. None for an API format of a plugin."""
    api = APIS.get(call.dialect)
    if api is None:
        return None
    request = _literal(_arguments(api, call))
    return Copies(curl=_curl(api, call), python=_python(api, request), test=_test(api, call, answer, request))


def _curl(api: Api, call: Call) -> str:
    """The body comes last: nothing in it is expanded between `<<'REQUEST'` and a line with `REQUEST` alone."""
    body = dict(call.request)
    query = ""
    if call.dialect == "google.gemini":
        query = "?alt=sse" if body.get("sse") else ""
        body = {name: value for name, value in body.items() if name not in IN_PATH}
    model, verb = (quote(str(call.request.get(name, "")), safe="") for name in ("model", "verb"))
    url = api.url.replace("{model}", model).replace("{verb}", verb)
    headers = "".join(f'  -H "{header}" \\\n' for header in (*api.headers, "Content-Type: application/json"))
    return f"curl -sSN \"{url}{query}\" \\\n{headers}  --data-binary @- <<'REQUEST'\n{_json(body)}\nREQUEST\n"


def _python(api: Api, request: str) -> str:
    return (
        f"{api.imports}\n\n{api.client}  # reads {api.variables}\n"
        f"request = {request}\n"
        f"answer = {api.create}(**request)\nprint(answer)\n"
    )


def _test(api: Api, call: Call, answer: Message | None, request: str) -> str:
    tools = () if answer is None else answer.tool_calls
    lines = [
        f"    answer = {api.create}(**REQUEST)",
        *([f"    tools = {api.tools}"] if tools else []),
        *(_expected(api, call, answer)),
    ]
    body = "\n".join(lines)
    return (
        f"{'import json' + chr(10) * 2 if 'json.' in body else ''}{api.imports}\n\n"
        f"REQUEST = {request}\n\n\n"
        f"def {_name(call)}() -> None:\n"
        f"    {api.client}  # reads {api.variables}\n{body}\n"
    )


def _expected(api: Api, call: Call, answer: Message | None) -> list[str]:
    """What is certain of a good answer."""
    if answer is not None and answer.tool_calls:
        names = [tool_call.name for tool_call in answer.tool_calls]
        return [f"    assert [name for name, arguments in tools] == {_literal(names)}", *_keys(answer)]
    if answer is None or not answer.content.strip():
        return ["    assert answer"]
    if _is_json(answer.content) and _wants_json(call.request):
        return [f"    json.loads({api.text})"]
    return [f"    assert ({api.text}).strip()"]


def _keys(answer: Message) -> list[str]:
    """The arguments that the model named. Their values may be others."""
    keys = [_object_keys(tool_call.arguments) for tool_call in answer.tool_calls]
    if any(own is None for own in keys):
        return []
    return [f"    assert [sorted(arguments) for name, arguments in tools] == {_literal(keys)}"]


def _object_keys(text: str) -> list[str] | None:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return None
    return sorted(value) if isinstance(value, dict) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _wants_json(request: Mapping[str, Any]) -> bool:
    """Whether the request demands JSON."""
    wanted = json.dumps([request.get(name) for name in ("response_format", "text", "generationConfig")])
    return any(word in wanted for word in ("json_object", "json_schema", "application/json"))


def _arguments(api: Api, call: Call) -> dict[str, Any]:
    """The arguments of the SDK's function, without streaming."""
    request = {name: value for name, value in call.request.items() if name not in STREAMING}
    if call.dialect == "google.gemini":
        return _of_gemini(request)
    named = {name: value for name, value in request.items() if name in api.named}
    others = {name: value for name, value in request.items() if name not in api.named}
    return named | ({"extra_body": others} if others else {})


def _of_gemini(request: Mapping[str, Any]) -> dict[str, Any]:
    """Google's SDK has one `config` for all but the conversation."""
    fields = {name: value for name, value in request.items() if name not in (*IN_PATH, "contents")}
    config: dict[str, Any] = {}
    for name, value in fields.items():
        generation = name in ("generationConfig", "generation_config") and isinstance(value, Mapping)
        config |= value if generation else {name: value}
    config = {name: value for name, value in config.items() if value is not None}
    found = {"model": request.get("model"), "contents": _with_bytes(request.get("contents"))}
    return found | ({"config": _with_bytes(config)} if config else {})


def _with_bytes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _decoded(one) if name in BYTES else _with_bytes(one) for name, one in value.items()}
    return [_with_bytes(one) for one in value] if isinstance(value, list) else value


def _decoded(text: Any) -> Any:
    try:
        return b64decode(text, validate=True)
    except (Error, TypeError, ValueError):
        return text


def _json(body: Mapping[str, Any]) -> str:
    return _printable(json.dumps(body, indent=1, ensure_ascii=False))


def _printable(text: str) -> str:
    """Control characters and half surrogate pairs, which stand in strings alone, as JSON escapes."""

    def escaped(found: re.Match[str]) -> str:
        character = found[0]
        return character if character == "\n" or character.isprintable() else json.dumps(character)[1:-1]

    return re.sub(r"[^ -~]", escaped, text)


def _literal(value: Any) -> str:
    """Python code. `repr` escapes what cannot be printed."""
    if not isinstance(value, dict):
        return pformat(value, width=WIDTH, sort_dicts=False)
    lines = (f"{name!r}: {pformat(one, width=WIDTH, sort_dicts=False)}," for name, one in value.items())
    return "{\n" + "".join(f"{indent(line, INDENT)}\n" for line in lines) + "}"


def _name(call: Call) -> str:
    words: Sequence[str] = re.findall(r"[a-z0-9]+", f"{call.agent} {call.index + 1}".lower())
    return "test_call_" + "_".join(words)
