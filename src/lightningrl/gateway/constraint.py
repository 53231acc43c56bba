"""Which grammar must an answer follow? Constrained decoding for required tools, strict tools and JSON schemas."""

from lightningrl.chat import ChatTemplate
from lightningrl.chat.grammar import grammar_of
from lightningrl.dialects.base import ChatRequest, Refused
from lightningrl.errors import UserError


def constraint(request: ChatRequest, template: ChatTemplate, *, strict: bool) -> str | None:
    """The grammar that the request demands; None: any answer is allowed.

    Forbidding parallel tool calls needs no grammar. Nor do strict tools if `strict` is off: a policy that is to learn
    such calls must sample them freely. Raises `Refused` for a schema that cannot be turned into a grammar.
    """
    has_strict_tool = any(tool["function"].get("strict") for tool in request.tools)
    exact = strict and request.tool_choice != "none" and has_strict_tool
    if request.tool_choice != "required" and request.json_schema is None and not exact:
        return None
    tools = request.tools
    if not strict:
        tools = tuple({**tool, "function": {**tool["function"], "strict": False}} for tool in tools)
    try:
        return grammar_of(
            template,
            tools=tools,
            tool_choice=request.tool_choice,
            tool_name=request.tool_name,
            parallel_tool_calls=request.parallel_tool_calls,
            json_schema=request.json_schema,
        )
    except UserError as error:
        raise Refused(400, error.message, code="invalid_schema", hint=error.hint) from error
