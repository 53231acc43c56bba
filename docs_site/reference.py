"""Write the pages of the reference that come from the code: `make reference`.

    docs/settings.md   from the settings and the docstrings below them
    docs/cli.md        from the commands and their help
    docs/http.md       from the dialects, the routes and the errors of the gateway
    docs/gpu.md        its table of models and GPUs, from the estimator

docs/python.md needs no step: the site renders it from the docstrings.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from docs_site import cards
from lightningrl import plugins
from lightningrl.cli.settings import settings_page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lightningrl"

CLI_HEAD = """# Command line

Errors that you can fix end with exit code 2 and a hint. `--json` prints one JSON object last on stdout.
This page is generated: `make reference`.

"""
HTTP_HEAD = """# HTTP

What the gateway serves. Paths work with and without `/v1` or `/v1beta` in front, and below `/r/<token>`. Azure's paths,
`/openai/deployments/<model>/…`, work as well. [The gateway](gateway.md) says how a request is identified and routed.
This page is generated: `make reference`.

"""
DIALECT_PATHS = (
    "/chat/completions",
    "/responses",
    "/responses/input_tokens",
    "/completions",
    "/messages",
    "/messages/count_tokens",
    "/models/<model>:generateContent",
    "/models/<model>:streamGenerateContent",
    "/models/<model>:countTokens",
)
OTHER_PATHS = """
| method | path | what it does | key |
|---|---|---|---|
| GET | `/health` and `/` | `{"status": "ok"}` | none |
| GET | `/models`, `/models/<model>` | the models that routes name | none |
| POST | `/embeddings` | relays to the upstream that `gateway.embeddings` names | token |
| POST | `/traces` | takes OpenTelemetry spans ([AIR](air.md#where-spans-come-from)) | token |
| POST | `/rewards` | takes an agent's reward for one of its calls ([AIR](air.md#an-agents-own-rewards)) | token |
| GET | `/replay/tools` | the recorded tool results of a branch ([tools](replayable.md#tools)) | token |
| POST | `/abandon` | gives up the sampling of a [named request](gateway.md#load-errors-and-limits) | token |
| GET | `/workers` | the workers that are connected ([workers](workers.md)) | worker key |
| POST | `/workers/hello` | admits a worker, and compares its copy of the recipe | worker key |
| POST | `/workers/claim` | gives it attempts; waits for them for up to 30 s | worker key |
| POST | `/workers/heartbeat` | renews their leases; says which are still the worker's | worker key |
| POST | `/workers/finish` | ends an attempt | worker key |
| POST | `/workers/bye` | a worker leaves | worker key |

A token is that of a running attempt, and opens the paths of the dialects as well. See also
[Security](security.md#who-may-do-what).
"""


def cli_page() -> str:
    """What typer says of every command, without its marks of types."""
    command = [sys.executable, "-m", "typer", "lightningrl.cli.app", "utils", "docs", "--name", "lightningrl"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    commands = said[said.index("\n## ") + 1 :]
    for pattern, text in (
        (r"(`--[a-z-]+) <path>`", r"\1 PATH`"),
        (r"(`--[a-z-]+) <(?:int|int range|float|float range)>`", r"\1 NUMBER`"),
        (r"(`--[a-z-]+) <(?:str|list\[str\])>`", r"\1 TEXT`"),
        (r" <(?:str|list\[str\]|path)>`", "`"),
        (r" <((?:\w+\|)+\w+)>`", r" \1`"),
        (r"\{(\w+)\}", r"\1"),
        (r"  \[(?:required|default: inf)\]", ""),
        (r"; x>=\d+\]", "]"),
        (r"  \[x>=\d+\]", ""),
        (r"\* `--help`: Show this message and exit\.\n", ""),
        (r"\*\*Options\*\*:\n\n\n", ""),
    ):
        commands = re.sub(pattern, text, commands)
    return CLI_HEAD + commands.rstrip() + "\n"


def http_page() -> str:
    return HTTP_HEAD + "\n".join([*_dialects(), "## Other paths", OTHER_PATHS, *_errors()]).rstrip() + "\n"


def _dialects() -> Iterator[str]:
    """A section for each dialect: its paths, and the fields of a request that are read."""
    for name in plugins.BUILTIN["dialect"]:
        dialect = plugins.load(name, kind="dialect")()
        paths = [path for path in DIALECT_PATHS if dialect.match(path.replace("<model>", "m"), "") is not None]
        yield f"## {name}\n\n{', '.join(f'`POST {path}`' for path in paths)}\n"
        module = sys.modules[type(dialect).__module__]
        fields = _read_in_passing(module) | _fields(module._Body)
        yield "Fields of a request. Fields with another name are ignored.\n\n| field | type |\n|---|---|"
        yield from (f"| `{field}` | {kind} |" for field, kind in sorted(fields.items()))
        yield ""


def _read_in_passing(module: ModuleType) -> dict[str, str]:
    """Fields that the code takes from the body as they are, without a type."""
    names = re.findall(r"\bbody\.get\(\"([a-zA-Z]+)\"\)", inspect.getsource(module))
    return dict.fromkeys(names, "any")


def _fields(body: type[msgspec.Struct]) -> dict[str, str]:
    """Name and type of each field on the wire. An object's own fields are in parentheses."""
    [reference], definitions = msgspec.json.schema_components([body])
    schema = definitions[reference["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    return {
        name: _kind(kind, definitions) + (", required" if name in required else "")
        for name, kind in schema["properties"].items()
    }


def _kind(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        properties = definitions[schema["$ref"].rpartition("/")[2]].get("properties", {})
        return f"object ({', '.join(f'`{name}`' for name in properties)})" if properties else "object"
    if "anyOf" in schema:
        kinds = [_kind(one, definitions) for one in schema["anyOf"] if one.get("type") != "null"]
        return "; or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if schema.get("type") == "array":
        return f"array of {_kind(schema['items'], definitions)}" if schema.get("items") else "array"
    return schema.get("type", "any") + _range(schema)


def _range(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and most is not None and most < 2**31:
        return f", {least} to {most}"
    return f", at least {least}" if least is not None else ""


def _errors() -> Iterator[str]:
    """The words that errors carry in `error.code`, with their status: every `Refused(…)` in the code."""
    found: dict[str, set[int]] = {}
    for status, code in refusals():
        found.setdefault(code, set()).add(status)
    yield "## Errors\n\nAn error has the shape of the request's dialect. OpenAI's has its word in `error.code`:\n"
    yield "| code | status |\n|---|---|"
    for code, statuses in sorted(found.items()):
        yield f"| `{code}` | {', '.join(map(str, sorted(statuses)))} |"


def refusals() -> Iterator[tuple[int, str]]:
    """Status and code of each `Refused(status, message, code="…")`, also where a function with a `code` makes it."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(SOURCE.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    makers = dict(_makers(node for node in nodes if isinstance(node, ast.FunctionDef)))
    for call in nodes:
        if not isinstance(call, ast.Call) or (name := _name(call)) not in {"Refused", *makers}:
            continue
        given = _constants(word.value for word in call.keywords if word.arg == "code")
        statuses, default = makers.get(name, (_integers(call.args[:1]), []))
        yield from ((status, code) for status in statuses for code in given or default)


def _makers(functions: Iterable[ast.FunctionDef]) -> Iterator[tuple[str, tuple[list[int], list[str]]]]:
    """Functions that return a `Refused` with the `code` they are given → its status, and the code by default."""
    for function in functions:
        codes = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        default = [_constants([value]) for one, value in codes if one.arg == "code" and value is not None]
        for call in ast.walk(function):
            if default and isinstance(call, ast.Call) and _name(call) == "Refused":
                yield function.name, (_integers(call.args[:1]), default[0])


def _name(call: ast.Call) -> str:
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")


def _integers(nodes: Iterable[ast.AST]) -> list[int]:
    return [value for value in _constants(nodes) if isinstance(value, int)]


def _constants(nodes: Iterable[ast.AST]) -> list[Any]:
    return [one.value for node in nodes for one in ast.walk(node) if isinstance(one, ast.Constant)]


def gpu_page() -> str:
    return cards.page(ROOT)


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "cli.md": cli_page,
    "http.md": http_page,
    "gpu.md": gpu_page,
}
"""File below docs/ → the function that returns its text."""


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
