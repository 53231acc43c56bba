"""In a real run of the math agent, its calculator raises and its server is killed. Neither counts as reward 0."""

from pathlib import Path

from tests.recipes.failures import copied, trained

SCRIPT = """
from tests.recipes.forced import kill

begun = 0


def script(prompt, messages, tools):
    global begun
    results = [message for message in messages if message["role"] == "tool"]
    if not results:
        begun += 1
        return [{"name": "calculator", "arguments": {"expression": "40 + 2"}}]
    if len(results) == 1:
        if begun == 5:
            kill("calculator.py")
        return [{"name": "calculator", "arguments": {"expression": "FAIL" if begun == 3 else "42 *"}}]
    assert [result["content"] for result in results] == ["42", "error: not an expression"] or begun in (3, 5)
    return str(42 + begun % 2)
"""
BREAK = '    """work out + - * / ** ( )"""\n'


async def test_a_calculator_that_raises_or_is_killed_fails_its_attempt_and_the_next_one_is_rewarded(
    model_folder: Path, tmp_path: Path
) -> None:
    change = {"calculator.py": (BREAK, BREAK + '    if expression == "FAIL":\n        raise OSError("out of paper")\n')}
    recipe = copied(
        "math_autogen",
        tmp_path,
        model=model_folder,
        task={"question": "40 + 2", "answer": "42"},
        script=SCRIPT,
        change=change,
    )
    run = await trained(recipe, "agent.env.MATH_MAX_TOKENS='400'")
    raised, died = sorted(run.failed(), key=lambda line: "died" in line)
    assert raised.startswith("AgentError: CalculatorFailed: the calculator has failed: ") and raised.endswith(
        "out of paper"
    )
    assert died.startswith("AgentError: CalculatorFailed: the calculator's server has died")
    run.check()
