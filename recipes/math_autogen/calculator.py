"""A calculator as an MCP server over stdin and stdout, with one tool that evaluates an expression exactly.

    37 * 48 - 5 → 1771        1 / 3 → 0.333333333333        7 / 0 → error: division by zero

`python calculator.py` runs it. An expression that cannot be evaluated is answered with `error: …`.
"""

import ast
import operator
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

from mcp.server.fastmcp import FastMCP

LONGEST = 200
"""Maximum length of an expression, in characters."""
LARGEST_BASE, LARGEST_EXPONENT = 10**9, 16
"""Larger powers are refused: they would take endless memory and time."""
DIGITS = 12
"""Digits of a result that is not whole."""

OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

server = FastMCP("calculator", log_level="WARNING")


@server.tool(structured_output=False)
def calculator(expression: str) -> str:
    """work out + - * / ** ( )"""
    if len(expression) > LONGEST:
        return "error: too long"
    try:
        return written(value_of(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError as error:
        return f"error: {error}"
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: deeply nested brackets
        return "error: not an expression"


def value_of(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool() | str() | complex()):
            raise ValueError("not a number")
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))  # so 0.1 is exactly a tenth
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return power(value_of(left), value_of(right))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](value_of(left), value_of(right))
    raise ValueError("not an expression")


def power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(base) > LARGEST_BASE or abs(exponent) > LARGEST_EXPONENT or exponent.denominator != 1:
        raise OverflowError("too large")
    return base**exponent.numerator


def written(number: Fraction) -> str:
    """The number in full, or rounded to `DIGITS` digits if it is not whole."""
    if number.denominator == 1:
        return str(number.numerator)
    with localcontext(prec=DIGITS):
        return f"{Decimal(number.numerator) / Decimal(number.denominator):f}"


if __name__ == "__main__":
    server.run()
