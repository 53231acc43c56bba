"""What does a stored request or response say of tools? One reader for each dialect: who asked for which tool, and what
came of it.

Bodies are taken as they come: those that were relayed to another server have been read by nobody before.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec

Body: TypeAlias = Mapping[str, Any]

SIGNED = b"lightningrl:"
"""What the gateway's signatures on Gemini's function calls begin with; a call's id follows."""
UNREADABLE = "INVALID_JSON"
"""Where a wire has no place for arguments that are no JSON object, they are the text below this key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A model has asked for a tool."""

    id: str
    """Of the tool call; "" where the wire has none."""
    name: str
    arguments: str
    """As the model wrote them, as far as the wire keeps that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A request tells what came of a tool call."""

    id: str
    """Of the tool call; "" where the request does not say."""
    asked: Ask | None
    """The tool call, as this request repeats it; None if it does not."""
    output: str
    failed: bool = False
    """The wire itself says that it failed."""


class Reader(Protocol):
    """Of one dialect."""

    def asks(self, response: Body) -> list[Ask]:
        """The tools that an answer asks for, in order."""
        ...

    def told(self, request: Body) -> list[Told]:
        """Every tool result in a request, the repeated ones too, in order."""
        ...

    def text(self, response: Body) -> str:
        """What was said beside tool calls."""
        ...

    def tools(self, request: Body) -> bool:
        """Whether the model was offered any."""
        ...


class Chat:
    """`openai.chat`, also with its older functions, whose calls have no id."""

    def asks(self, response: Body) -> list[Ask]:
        return [
            ask for choice in _objects(response.get("choices")) for ask in self._asks(_object(choice.get("message")))
        ]

    def told(self, request: Body) -> list[Told]:
        asked: dict[str, Ask] = {}
        functions: dict[str, Ask] = {}
        told: list[Told] = []
        for message in _objects(request.get("messages")):
            for ask in self._asks(message):
                (asked if ask.id else functions)[ask.id or ask.name] = ask
            if message.get("role") == "tool":
                tool_id = _text(message.get("tool_call_id"))
                told.append(Told(id=tool_id, asked=asked.get(tool_id), output=_text(message.get("content"))))
            elif message.get("role") == "function":
                told.append(
                    Told(id="", asked=functions.get(_text(message.get("name"))), output=_text(message.get("content")))
                )
        return told

    def text(self, response: Body) -> str:
        return "".join(
            _text(_object(choice.get("message")).get("content")) for choice in _objects(response.get("choices"))
        )

    def tools(self, request: Body) -> bool:
        return bool(request.get("tools") or request.get("functions"))

    def _asks(self, message: Body) -> list[Ask]:
        found: list[Ask] = []
        for call in _objects(message.get("tool_calls")):
            what = _object(call.get("function") or call.get("custom"))
            arguments = (
                what.get("arguments", "{}") if "function" in call else custom_arguments(_text(what.get("input")))
            )
            found.append(Ask(id=_text(call.get("id")), name=_text(what.get("name")), arguments=_text(arguments)))
        older = _object(message.get("function_call"))
        if older and not found:
            found.append(Ask(id="", name=_text(older.get("name")), arguments=_text(older.get("arguments", "{}"))))
        return found


class Responses:
    """`openai.responses`. A request may bring new items only, and leave the rest to the server's memory."""

    def asks(self, response: Body) -> list[Ask]:
        return [ask for item in _objects(response.get("output")) if (ask := self._ask(item)) is not None]

    def told(self, request: Body) -> list[Told]:
        asked: dict[str, Ask] = {}
        told: list[Told] = []
        for item in _objects(request.get("input")):
            tool_id = _text(item.get("call_id"))
            if (ask := self._ask(item)) is not None:
                asked[ask.id] = ask
            elif tool_id and _text(item.get("type")).endswith("_call_output"):
                told.append(Told(id=tool_id, asked=asked.get(tool_id), output=_text(item.get("output"))))
        return told

    def text(self, response: Body) -> str:
        return "".join(
            _text(item.get("content")) for item in _objects(response.get("output")) if item.get("type") == "message"
        )

    def tools(self, request: Body) -> bool:
        return bool(request.get("tools"))

    def _ask(self, item: Body) -> Ask | None:
        if not _text(item.get("type")).endswith("_call") or not item.get("call_id"):
            return None
        name, space = _text(item.get("name")), _text(item.get("namespace"))
        arguments = item["arguments"] if "arguments" in item else custom_arguments(_text(item.get("input")))
        between = "__" if space and not space.endswith("__") else ""
        return Ask(id=_text(item.get("call_id")), name=f"{space}{between}{name}", arguments=_text(arguments))


class Messages:
    """`anthropic.messages`, the one wire that says of a result that it is an error."""

    def asks(self, response: Body) -> list[Ask]:
        return [ask for block in _objects(response.get("content")) if (ask := self._ask(block)) is not None]

    def told(self, request: Body) -> list[Told]:
        asked: dict[str, Ask] = {}
        told: list[Told] = []
        for block in (
            block for message in _objects(request.get("messages")) for block in _objects(message.get("content"))
        ):
            if (ask := self._ask(block)) is not None:
                asked[ask.id] = ask
            elif block.get("type") == "tool_result":
                tool_id, failed = _text(block.get("tool_use_id")), block.get("is_error") is True
                told.append(
                    Told(id=tool_id, asked=asked.get(tool_id), output=_text(block.get("content")), failed=failed)
                )
        return told

    def text(self, response: Body) -> str:
        return "".join(
            _text(block.get("text")) for block in _objects(response.get("content")) if block.get("type") == "text"
        )

    def tools(self, request: Body) -> bool:
        return bool(request.get("tools"))

    def _ask(self, block: Body) -> Ask | None:
        if block.get("type") != "tool_use":
            return None
        return Ask(id=_text(block.get("id")), name=_text(block.get("name")), arguments=_written(block.get("input")))


class Gemini:
    """`google.gemini`. A result may have an id, or be left to the name of its function and its place."""

    def asks(self, response: Body) -> list[Ask]:
        contents = (_object(candidate.get("content")) for candidate in _objects(response.get("candidates")))
        return [
            ask
            for content in contents
            for part in _objects(content.get("parts"))
            if (ask := self._ask(part)[1]) is not None
        ]

    def told(self, request: Body) -> list[Told]:
        waiting: list[tuple[str, Ask]] = []
        told: list[Told] = []
        for part in (part for content in _objects(request.get("contents")) for part in _objects(content.get("parts"))):
            known, ask = self._ask(part)
            if ask is not None:
                waiting.append((known, ask))
            if result := _object(_either(part, "functionResponse", "function_response")):
                told.append(self._told(result, waiting))
        return told

    def text(self, response: Body) -> str:
        contents = (_object(candidate.get("content")) for candidate in _objects(response.get("candidates")))
        return "".join(
            _text(part.get("text"))
            for content in contents
            for part in _objects(content.get("parts"))
            if not part.get("thought")
        )

    def tools(self, request: Body) -> bool:
        return bool(request.get("tools"))

    def _ask(self, part: Body) -> tuple[str, Ask | None]:
        """(the id that the client knows, the call)"""
        called = _object(_either(part, "functionCall", "function_call"))
        if not called:
            return "", None
        known = _text(called.get("id"))
        ours = _signed(_text(_either(part, "thoughtSignature", "thought_signature")))
        return known, Ask(id=ours or known, name=_text(called.get("name")), arguments=_written(called.get("args")))

    def _told(self, result: Body, waiting: list[tuple[str, Ask]]) -> Told:
        tool_id, name = _text(result.get("id")), _text(result.get("name"))
        fits = [
            place for place, (known, ask) in enumerate(waiting) if (known == tool_id if tool_id else ask.name == name)
        ]
        ask = waiting.pop(fits[0])[1] if fits else None
        return Told(id=ask.id if ask is not None else tool_id, asked=ask, output=_unwrapped(result.get("response")))


READERS: Mapping[str, Reader] = {
    "openai.chat": Chat(),
    "openai.responses": Responses(),
    "anthropic.messages": Messages(),
    "google.gemini": Gemini(),
}
"""By `Call.dialect`. Raw completions know no tools."""


def custom_arguments(text: str) -> str:
    """How a tool that takes plain text is shown as one that takes an object."""
    return msgspec.json.encode({"input": text}).decode()


def _either(body: Body, camel: str, snake: str) -> Any:
    return body.get(camel, body.get(snake))


def _object(value: Any) -> Body:
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[Body]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    """Content in any of its forms: text, parts with texts, nothing; anything else as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(part, str) or (isinstance(part, Mapping) and "type" in part) for part in value)
    ):
        return "\n".join(part if isinstance(part, str) else _text(part.get("text", "")) for part in value)
    return msgspec.json.encode(value).decode()


def _written(arguments: Any) -> str:
    """The text of arguments that the wire keeps as an object."""
    given = _object(arguments)
    if set(given) == {UNREADABLE}:
        return _text(given[UNREADABLE])
    return msgspec.json.encode(arguments if arguments is not None else {}).decode()


def _unwrapped(response: Any) -> str:
    """`{"result": 3}` and `{"output": 3}` are how SDKs wrap what a function returned."""
    given = _object(response)
    return _text(
        given[next(iter(given))] if len(given) == 1 and not {"result", "output"}.isdisjoint(given) else response
    )


def _signed(signature: str) -> str:
    """The id in a signature of the gateway's, in either alphabet of base64; "" if it is another's."""
    try:
        plain = base64.b64decode(signature.translate(str.maketrans("-_", "+/")) + "==")
    except ValueError:
        return ""
    return plain[len(SIGNED) :].decode(errors="replace") if plain.startswith(SIGNED) else ""
