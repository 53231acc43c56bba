"""Arguments of tool calls: text ⇄ object."""

import pytest

from lightningrl.arguments import arguments_key, from_object, malformed, to_object


def test_white_space_and_the_order_of_keys_make_no_difference() -> None:
    assert arguments_key('{"a": 1, "b": [2]}') == arguments_key('{"b":[2],"a":1}') != arguments_key('{"a":1,"b":[3]}')
    assert arguments_key(" {oops ") == arguments_key("{oops")


@pytest.mark.parametrize("text", ["{oops", "[1]", "3", '"x"', "\ud800"])
def test_text_that_is_no_json_object_survives_a_wire_that_carries_objects(text: str) -> None:
    assert malformed(text) and from_object(to_object(text)) == text


@pytest.mark.parametrize(("text", "value"), [("", {}), (" ", {}), ('{"a":1}', {"a": 1})])
def test_an_object_is_read_as_it_is(text: str, value: object) -> None:
    assert not malformed(text) and to_object(text) == value


def test_no_arguments_are_an_empty_object() -> None:
    assert from_object(None) == from_object({}) == "{}"
