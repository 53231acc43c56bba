"""Google's schemas → JSON schema. Gemini takes a subset of OpenAPI 3.0, with keys in camelCase or snake_case.

https://ai.google.dev/api/caching#Schema
"""

from collections.abc import Mapping
from typing import Any

import msgspec

COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
NO_FORMATS = frozenset({"int32", "int64", "float", "double", "enum", "byte"})
"""Formats of OpenAPI that JSON schema does not have."""
TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Their values are schemas by any name, which may be `type`."""
VALUES = frozenset({"enum", "const", "default", "examples"})


def camel(key: str) -> str:
    """`any_of` → `anyOf`."""
    if "_" not in key:
        return key
    first, *rest = key.split("_")
    return first + "".join(word.capitalize() for word in rest)


def json_schema(given: Mapping[str, Any]) -> dict[str, Any]:
    """`{"type": "STRING", "nullable": true}` → `{"type": ["string", "null"]}`.

    Raises `msgspec.ValidationError` for an invalid schema.
    """
    schema = {camel(key): value for key, value in given.items()}
    nullable = schema.pop("nullable", None)
    order = msgspec.convert(schema.pop("propertyOrdering", None) or [], list[str])
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type":
            made[key] = value.lower() if isinstance(value, str) else value
        elif key in ("items", "additionalProperties") and isinstance(value, Mapping):
            made[key] = json_schema(value)
        elif key == "anyOf":
            made[key] = [json_schema(one) for one in msgspec.convert(value, list[dict[str, Any]])]
        elif key in ("properties", "defs"):
            inner = {name: json_schema(one) for name, one in msgspec.convert(value, dict[str, dict[str, Any]]).items()}
            first = [name for name in order if name in inner] if key == "properties" else []
            made["$defs" if key == "defs" else key] = {name: inner[name] for name in (*first, *inner)}
        elif key in COUNTS:
            made[key] = msgspec.convert(value, int, strict=False)  # 64-bit numbers come as strings
        elif key == "enum":
            made[key] = msgspec.convert(value, list[Any])
        elif key == "ref":
            made["$ref"] = value
        elif key != "example" and not (key == "format" and str(value) in NO_FORMATS):
            made[key] = value
    return _or_null(made) if nullable else made


def lower_types(schema: Any) -> Any:
    """`{"type": "OBJECT"}` → `{"type": "object"}`. Google accepts both in a JSON schema; Gemini CLI relies on it."""
    if isinstance(schema, list):
        return [lower_types(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type":
            made[key] = [_lower(one) for one in value] if isinstance(value, list) else _lower(value)
        elif key in BY_NAME and isinstance(value, dict):
            made[key] = {name: lower_types(one) for name, one in value.items()}
        else:
            made[key] = value if key in VALUES else lower_types(value)
    return made


def _lower(name: Any) -> Any:
    return name.lower() if isinstance(name, str) and name in TYPES else name


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    if "anyOf" in schema:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    return schema
