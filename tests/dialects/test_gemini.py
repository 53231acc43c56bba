"""Does the dialect read the requests of Google's clients, and write responses that the SDK's types accept?"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from google.genai import errors, types

from lightningrl.dialects.base import ChatRequest, Choice, Past, Refused, Reply, TokenLogprob
from lightningrl.dialects.gemini import Gemini
from lightningrl.dialects.gemini_schema import json_schema, lower_types
from lightningrl.messages import Message, ToolCall

from .begun import begun

DIALECT = Gemini()
ASKED: Mapping[str, Any] = {"model": "m", "verb": "generateContent", "sse": False}
HELLO: Mapping[str, Any] = {"role": "user", "parts": [{"text": "hello"}]}
WEATHER = {
    "name": "weather",
    "description": "look",
    "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}},
}
NOW = {"name": "now", "parametersJsonSchema": {"type": "object", "properties": {}}}
SHOW = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
CALL = {"functionCall": {"id": "call_1", "name": "weather", "args": {"city": "Paris"}}}


def parse(**fields: Any) -> ChatRequest:
    return DIALECT.parse({**ASKED, "contents": [HELLO], **fields}, Past())


def turns(*contents: Mapping[str, Any]) -> tuple[Message, ...]:
    return parse(contents=[HELLO, *contents]).messages[1:]


def model(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def choice(**fields: Any) -> Choice:
    message = Message(role="assistant", content=fields.pop("content", ""), **fields.pop("message", {}))
    plain: dict[str, Any] = {
        "finish_reason": "stop",
        "stopped_by": None,
        "completion_tokens": 7,
        "reasoning_tokens": 2,
        "tokens": None,
    }
    return Choice(index=fields.pop("index", 0), message=message, **{**plain, **fields})


def reply(*choices: Choice, **fields: Any) -> Reply:
    return Reply(id="gemini_1", request=parse(**fields), created=0, prompt_tokens=30, reused_tokens=20, choices=choices)


def whole(*choices: Choice, **fields: Any) -> types.GenerateContentResponse:
    return types.GenerateContentResponse.model_validate(
        json.loads(json.dumps(DIALECT.respond(reply(*choices, **fields))))
    )


def streamed(one: Choice, *pieces: tuple[str, str], **fields: Any) -> list[types.GenerateContentResponse]:
    answer = reply(one, sse=True, **fields)
    stream = DIALECT.stream(answer)
    data = b"".join(
        stream.reasoning(0, text) if kind == "reasoning" else stream.text(0, text, None) for kind, text in pieces
    )
    data += stream.finish(one) + stream.close(answer)
    return [
        types.GenerateContentResponse.model_validate_json(event.removeprefix("data: "))
        for event in data.decode().split("\n\n")[:-1]
    ]


def parts_of(response: types.GenerateContentResponse) -> list[types.Part]:
    assert response.candidates is not None
    assert response.candidates[0].content is not None
    return response.candidates[0].content.parts or []


def refusal(**fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        parse(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/gemini-3-flash:generateContent", "gemini-3-flash"),
        ("/models/qwen/qwen3:8b:generateContent", "qwen/qwen3:8b"),
        ("/tunedModels/mine:generateContent", "mine"),
        ("/publishers/google/models/gemini-3:generateContent", "gemini-3"),
        ("/projects/p/locations/l/publishers/google/models/gemini-3:generateContent", "gemini-3"),
        ("/projects/p/locations/l/endpoints/123:generateContent", "123"),
    ],
)
def test_the_model_is_in_the_path(path: str, name: str) -> None:
    assert DIALECT.match(path, "") == {"model": name, "verb": "generateContent", "sse": False}


def test_verbs_are_in_the_path_too() -> None:
    assert DIALECT.match("/models/m:streamGenerateContent", "key=k&alt=sse") == {
        "model": "m",
        "verb": "streamGenerateContent",
        "sse": True,
    }
    assert DIALECT.match("/models/m:embedContent", "") is None
    assert DIALECT.match("/models", "") is None
    assert parse(verb="streamGenerateContent").stream
    assert not parse().stream
    assert parse().counted is None


def test_tokens_of_a_wrapped_request_are_counted() -> None:
    wrapped = {
        "contents": [HELLO],
        "systemInstruction": {"parts": [{"text": "be brief"}]},
        "tools": [{"functionDeclarations": [WEATHER]}],
    }
    for asked in (
        parse(verb="countTokens", **wrapped),
        parse(verb="countTokens", contents=None, generateContentRequest={**wrapped, "model": "models/x"}),
    ):
        assert asked.counted is not None
        assert types.CountTokensResponse.model_validate(asked.counted(12)).total_tokens == 12
        assert (asked.model, len(asked.messages), len(asked.tools)) == ("m", 2, 1)


CAMEL = {
    "systemInstruction": {"parts": [{"text": "be brief"}]},
    "tools": [{"functionDeclarations": [WEATHER, NOW]}, {"googleSearch": {}}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["now"]}},
    "generationConfig": {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 40.0,
        "maxOutputTokens": 9,
        "stopSequences": ["x", ""],
        "candidateCount": 2,
        "seed": 5,
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
        "responseLogprobs": True,
        "logprobs": 3,
    },
    "safetySettings": [],
    "somethingNew": 1,
}
SNAKE = {
    "system_instruction": CAMEL["systemInstruction"],
    "tools": [
        {"function_declarations": [WEATHER, {"name": "now", "parameters_json_schema": NOW["parametersJsonSchema"]}]}
    ],
    "tool_config": {"function_calling_config": {"mode": "any", "allowed_function_names": ["now"]}},
    "generation_config": {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "max_output_tokens": "9",
        "stop_sequences": ["x"],
        "candidate_count": 2,
        "seed": 5,
        "response_mime_type": "application/json",
        "response_json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "response_logprobs": True,
        "logprobs": 3,
    },
}


@pytest.mark.parametrize("fields", [CAMEL, SNAKE])
def test_a_full_request_is_understood_in_either_case(fields: dict[str, Any]) -> None:
    asked = parse(**fields)
    assert asked.messages == (Message(role="system", content="be brief"), Message(role="user", content="hello"))
    assert [tool["function"] for tool in asked.tools] == [
        {
            "name": "weather",
            "description": "look",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
        {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    ]
    assert (asked.tool_choice, asked.tool_name) == ("required", "now")
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens, asked.stop, asked.seed) == (
        0.5,
        0.9,
        40,
        9,
        ("x",),
        5,
    )
    assert (asked.n, asked.logprobs, asked.top_logprobs) == (2, True, 3)
    assert asked.json_schema == {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("config", "expected", "shown"),
    [
        ({}, "auto", 2),
        ({"mode": "AUTO"}, "auto", 2),
        ({"mode": "NONE"}, "none", 2),
        ({"mode": "ANY"}, "required", 2),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["now"]}, "auto", 1),
    ],
)
def test_which_functions_may_be_called(config: dict[str, Any], expected: str, shown: int) -> None:
    asked = parse(
        tools=[{"functionDeclarations": [WEATHER]}, {"functionDeclarations": [NOW]}],
        toolConfig={"functionCallingConfig": config},
    )
    assert (asked.tool_choice, asked.tool_name, len(asked.tools)) == (expected, None, shown)


def test_json_without_a_schema_is_an_object_and_other_formats_are_text() -> None:
    assert parse(generationConfig={"responseMimeType": "application/json"}).json_schema == {"type": "object"}
    assert (
        parse(
            generationConfig={"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a"]}}
        ).json_schema
        is None
    )
    assert parse().json_schema is None


def test_types_of_a_json_schema_may_be_in_googles_capitals() -> None:
    given = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "enum": ["OBJECT"]},
            "b": {"type": ["ARRAY", "NULL"], "items": {"type": "INTEGER"}},
        },
    }
    given |= {
        "required": ["OBJECT"],
        "anyOf": [{"type": "NUMBER"}, {"const": "STRING"}],
        "description": "STRING",
        "additionalProperties": False,
    }
    meant = {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["OBJECT"]},
            "b": {"type": ["array", "null"], "items": {"type": "integer"}},
        },
    }
    meant |= {
        "required": ["OBJECT"],
        "anyOf": [{"type": "number"}, {"const": "STRING"}],
        "description": "STRING",
        "additionalProperties": False,
    }
    assert lower_types(given) == meant
    config = {"responseMimeType": "application/json", "responseJsonSchema": given}
    assert parse(generationConfig=config).json_schema == meant
    assert (
        parse(tools=[{"functionDeclarations": [{"name": "a", "parametersJsonSchema": given}]}]).tools[0]["function"][
            "parameters"
        ]
        == meant
    )


def test_schemas_of_google_become_json_schemas() -> None:
    given = {
        "type": "OBJECT",
        "property_ordering": ["b", "a"],
        "properties": {
            "a": {"type": "STRING", "nullable": True, "enum": ["x"], "format": "enum", "minLength": "2"},
            "b": {
                "type": "ARRAY",
                "items": {"anyOf": [{"type": "INTEGER", "format": "int64"}, {"type": "NUMBER"}]},
                "max_items": 3,
                "example": [],
            },
            "any_of": {"any_of": [{"type": "BOOLEAN"}], "nullable": True},
        },
        "required": ["b"],
        "additionalProperties": False,
    }
    made = json_schema(given)
    assert made == {
        "type": "object",
        "properties": {
            "a": {"type": ["string", "null"], "enum": ["x", None], "minLength": 2},
            "b": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "number"}]}, "maxItems": 3},
            "any_of": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["b"],
        "additionalProperties": False,
    }
    assert list(made["properties"]) == ["b", "a", "any_of"]


def test_results_find_their_calls_by_id() -> None:
    other = {"functionCall": {"id": "call_2", "name": "weather", "args": {}}}
    results = [
        {"functionResponse": {"id": call_id, "name": "weather", "response": {"result": call_id}}}
        for call_id in ("call_2", "call_1")
    ]
    said, two, one, text = turns(model({"text": "let me look"}, CALL, other), user(*results, {"text": "go on"}))
    assert said.content == "let me look"
    assert said.tool_calls[0] == ToolCall(id="call_1", name="weather", arguments='{"city":"Paris"}')
    assert (two.tool_call_id, two.content, one.tool_call_id, one.content) == ("call_2", "call_2", "call_1", "call_1")
    assert (two.role, two.name) == ("tool", "weather")
    assert text == Message(role="user", content="go on")


def test_results_without_ids_find_their_calls_by_name_and_position() -> None:
    calls = [
        CALL,
        {"functionCall": {"id": "call_2", "name": "now"}},
        {"functionCall": {"id": "call_3", "name": "weather", "args": {}}},
    ]
    results = [
        {"functionResponse": {"name": name, "response": {"result": n}}}
        for n, name in enumerate(("weather", "weather", "now"))
    ]
    assert [turn.tool_call_id for turn in turns(model(*calls), user(*results))[1:]] == ["call_1", "call_3", "call_2"]


def test_ids_survive_clients_that_keep_only_signatures() -> None:
    """Some clients make their own ids; SDKs write base64 in either alphabet, with or without padding."""
    sent = DIALECT.respond(
        reply(
            choice(
                finish_reason="tool_calls",
                message={"tool_calls": (ToolCall(id="call_>?~", name="weather", arguments="{}"),)},
            )
        )
    )
    part = sent["candidates"][0]["content"]["parts"][0]
    signature = part["thoughtSignature"].replace("+", "-").replace("/", "_").rstrip("=")
    back = {"functionCall": {"id": "theirs", "name": "weather", "args": {}}, "thoughtSignature": signature}
    said, result = turns(model(back), user({"functionResponse": {"id": "theirs", "name": "weather", "response": {}}}))
    assert said.tool_calls[0].id == result.tool_call_id == "call_>?~"
    for foreign in ("CvcBAeOq", "not base64!", "ü"):
        [said] = turns(model({**back, "thoughtSignature": foreign}))
        assert said.tool_calls[0].id == "theirs"
    [said, result] = turns(
        model({"functionCall": {"name": "weather"}}), user({"functionResponse": {"name": "weather", "response": None}})
    )
    assert (said.tool_calls[0].id, result.tool_call_id, result.content) == ("", None, "")


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ({"result": "sunny"}, "sunny"),
        ({"output": {"t": 23}}, '{"t":23}'),
        ({"error": "no"}, '{"error":"no"}'),
        ({"a": 1, "result": 2}, '{"a":1,"result":2}'),
    ],
)
def test_the_return_value_of_a_function_is_unwrapped(response: dict[str, Any], content: str) -> None:
    _, result = turns(
        model(CALL), user({"functionResponse": {"id": "call_1", "name": "weather", "response": response}})
    )
    assert result.content == content


def test_an_answer_that_came_in_pieces_is_one_message() -> None:
    pieces = [model({"text": "hm", "thought": True}), model({"text": "let me "}), model({"text": "look"}), model(CALL)]
    result = user({"function_response": {"name": "weather", "response": {"result": "sunny"}}})
    said, answered = turns(*pieces, result)
    call = ToolCall(id="call_1", name="weather", arguments='{"city":"Paris"}')
    assert said == Message(role="assistant", content="let me look", reasoning="hm", tool_calls=(call,))
    assert answered.tool_call_id == "call_1"


def test_keys_that_the_agent_chooses_keep_their_case() -> None:
    call = {"function_call": {"name": "weather", "args": {"city_name": {"inner_key": 1}}}}
    result = {"function_response": {"name": "weather", "response": {"wind_speed": 3}}}
    said, answered = turns(model(call), user(result))
    assert said.tool_calls[0].arguments == '{"city_name":{"inner_key":1}}'
    assert answered.content == '{"wind_speed":3}'


@pytest.mark.parametrize(
    "part",
    [
        {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
        {"file_data": {"file_uri": "u"}},
        {"functionResponse": {"name": "weather", "response": {}, "parts": [{"inline_data": {"data": "AAAA"}}]}},
    ],
)
def test_content_without_text_is_refused(part: dict[str, Any]) -> None:
    refused = refusal(contents=[user(part)])
    assert (refused.status, "are not supported" in refused.message) == (400, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"contents": []},
        {"contents": None},
        {"contents": [{"parts": "hello"}]},
        {"contents": [user({"functionResponse": 3})]},
        {"generationConfig": {"temperature": "warm"}},
        {"generationConfig": {"temperature": "inf"}},
        {"generationConfig": {"temperature": "-Infinity"}},
        {"generationConfig": {"topP": "nan"}},
        {"generationConfig": {"topK": "inf"}},
        {"generationConfig": {"candidateCount": 9}},
        {"generationConfig": {"responseMimeType": "application/json", "responseSchema": {"properties": {"a": 3}}}},
        {"generationConfig": {"responseSchema": {"propertyOrdering": [[1]], "enum": 5}}},
        {"tools": [{"functionDeclarations": [{"name": "x", "parameters": {"minItems": "many"}}]}]},
        {
            "tools": [{"functionDeclarations": [NOW]}],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}},
        },
    ],
)
def test_an_invalid_request_is_refused(fields: dict[str, Any]) -> None:
    assert refusal(**fields).status == 400


def test_an_answer_is_a_response_of_the_sdk() -> None:
    call = ToolCall(id="call_1", name="weather", arguments='{"city":  "Paris", "on": true}')
    one = choice(content="let me look", finish_reason="tool_calls", message={"tool_calls": (call,), "reasoning": "hm"})
    response = whole(one, **SHOW)
    thought, text, called = parts_of(response)
    assert (thought.text, thought.thought, text.text, text.thought) == ("hm", True, "let me look", None)
    assert called.function_call == types.FunctionCall(id="call_1", name="weather", args={"city": "Paris", "on": True})
    assert response.candidates is not None
    assert response.candidates[0].finish_reason == types.FinishReason.STOP
    assert (response.model_version, response.response_id, response.text) == ("m", "gemini_1", "let me look")
    usage = response.usage_metadata
    assert usage is not None
    assert (usage.prompt_token_count, usage.cached_content_token_count) == (30, 20)
    assert (usage.candidates_token_count, usage.thoughts_token_count, usage.total_token_count) == (5, 2, 37)
    again = DIALECT.answer(DIALECT.respond(reply(one, **SHOW)))
    assert (again.content, again.reasoning, again.tool_calls[0].id) == ("let me look", "hm", "call_1")
    assert [part.text for part in parts_of(whole(one))] == ["let me look", None]  # reasoning only on request


def test_several_candidates_have_their_finish_reasons() -> None:
    response = whole(choice(content="a", finish_reason="length"), choice(index=1, finish_reason="error"))
    assert response.candidates is not None
    assert [candidate.finish_reason for candidate in response.candidates] == [
        types.FinishReason.MAX_TOKENS,
        types.FinishReason.OTHER,
    ]
    assert [candidate.index for candidate in response.candidates] == [0, 1]
    assert response.candidates[1].content is not None
    assert [part.text for part in response.candidates[1].content.parts or []] == [""]


def test_logprobs_are_sent() -> None:
    tokens = (
        TokenLogprob(text="a", logprob=-0.5, top=(("a", -0.5), ("b", -1.0))),
        TokenLogprob(text="c", logprob=-1.5),
    )
    response = whole(choice(content="ac", tokens=tokens))
    assert response.candidates is not None
    candidate = response.candidates[0]
    assert candidate.avg_logprobs == -1.0
    assert candidate.logprobs_result is not None
    chosen, top = candidate.logprobs_result.chosen_candidates, candidate.logprobs_result.top_candidates
    assert [(one.token, one.log_probability) for one in chosen or []] == [("a", -0.5), ("c", -1.5)]
    assert [[one.token for one in place.candidates or []] for place in top or []] == [["a", "b"], []]
    stream = DIALECT.stream(begun(parse(sse=True)))
    piece = types.GenerateContentResponse.model_validate_json(
        stream.text(0, "ac", tokens).decode().removeprefix("data: ")
    )
    assert piece.candidates is not None
    assert piece.candidates[0].logprobs_result == candidate.logprobs_result


def test_a_stream_adds_up_to_the_whole_answer() -> None:
    call = ToolCall(id="call_1", name="weather", arguments="{}")
    one = choice(
        content='say "äöü" €\u2028', finish_reason="tool_calls", message={"tool_calls": (call,), "reasoning": "hm, so"}
    )
    pieces = [
        ("reasoning", "hm,"),
        ("reasoning", " so"),
        ("text", ""),
        ("text", 'say "ä'),
        ("text", "öü"),
        ("text", '" €\u2028'),
    ]
    for fields in ({}, SHOW):
        chunks = streamed(one, *pieces, **fields)
        complete = whole(one, **fields)
        parts = [part for chunk in chunks for part in parts_of(chunk)]
        assert "".join(part.text or "" for part in parts if part.thought) == ("hm, so" if fields else "")
        assert "".join(part.text or "" for part in parts if not part.thought) == one.message.content
        assert chunks[-1].function_calls == complete.function_calls
        assert chunks[-1].usage_metadata == complete.usage_metadata
        assert {chunk.response_id for chunk in chunks} == {"gemini_1"}
        ends = [chunk.candidates[0].finish_reason for chunk in chunks if chunk.candidates]
        assert ends == [None] * (len(chunks) - 1) + [types.FinishReason.STOP]


def test_an_empty_answer_has_a_text_part() -> None:
    assert whole(choice()).text == ""
    assert [chunk.text for chunk in streamed(choice())] == [""]


def test_without_server_sent_events_a_stream_is_one_array() -> None:
    one = choice(content="ab")
    for begin in (("a", "b"), ()):
        answer = reply(one)
        stream = DIALECT.stream(answer)
        data = b"".join(stream.text(0, text, None) for text in begin) + stream.finish(one) + stream.close(answer)
        assert len(json.loads(data)) == len(begin) + 1
    stream = DIALECT.stream(reply(one))
    assert json.loads(stream.text(0, "a", None) + stream.error(Refused(503, "no")))[1]["error"]["code"] == 503


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "INVALID_ARGUMENT"),
        (401, "UNAUTHENTICATED"),
        (404, "NOT_FOUND"),
        (413, "INVALID_ARGUMENT"),
        (429, "RESOURCE_EXHAUSTED"),
        (503, "UNAVAILABLE"),
    ],
)
def test_errors_have_googles_names(status: int, name: str) -> None:
    error = errors.APIError(status, DIALECT.error(Refused(status, "no", hint="do", retry_after_s=1.5)))
    assert (error.code, error.status, error.message) == (status, name, "no; hint: do")
    details: Any = error.details
    assert details["error"]["details"][0]["retryDelay"] == "1.5s"


def test_a_stream_may_break() -> None:
    stream = DIALECT.stream(begun(parse(sse=True)))
    assert stream.error(Refused(503, "the engine raised")).startswith(
        b'data: {"error":'
    )  # the SDK recognises an error by this start


def test_arguments_that_are_no_object_are_wrapped() -> None:
    one = choice(
        finish_reason="tool_calls", message={"tool_calls": (ToolCall(id="c", name="weather", arguments="Paris"),)}
    )
    [part] = parts_of(whole(one))
    assert part.function_call is not None
    assert part.function_call.args == {"INVALID_JSON": "Paris"}
    response = {"candidates": [{"content": {"parts": [{"functionCall": part.function_call.model_dump()}]}}]}
    assert DIALECT.answer(response).tool_calls == one.message.tool_calls
