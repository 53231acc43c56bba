"""The agent searches, in its process or over MCP, and answers, with a scripted server on a real socket."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ANSWER = "<answer> tom hale </answer>"


@pytest.fixture(scope="module")
def question(rag: Any) -> Any:
    """A question of three steps."""
    return next(q for q in rag.tasks.questions("heldout", seed=0, count=20) if len(q.chain) == 3)


@pytest.fixture(scope="module")
def task(rag: Any, question: Any) -> Any:
    return rag.tasks.as_task(question, "x")["input"]


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")


def wish(query: object, *, place: int = 0, tool: str = "search") -> dict[str, Any]:
    arguments = query if isinstance(query, str) and query.startswith("{") else json.dumps({"query": query})
    return {
        "tool_calls": [{"id": f"call_{place}", "type": "function", "function": {"name": tool, "arguments": arguments}}]
    }


async def test_a_search_for_each_step_finds_the_answer(rag: Any, server: Any, question: Any, task: Any) -> None:
    server.answers = [
        *(wish(query, place=place) for place, query in enumerate(rag.questions.queries(question))),
        f"<answer> {question.answer} </answer>",
    ]
    output = await rag.agent.run(task)
    assert rag.tasks.reward(task, output) == {"final": 1.0, "f1": 1.0, "format": 1.0}
    assert server.keys == ["Bearer attempt-token"] * 4
    first, *_, last = server.asked
    assert (first["model"], first["instructions"]) == ("researcher", rag.agent.INSTRUCTIONS)
    assert first["input"] == [{"role": "user", "content": task["question"]}]
    _, found = read(last)
    assert len(found) == 3
    for text, name in zip(found, question.names[1:], strict=True):
        assert name in text
        assert len(text.split("\n")) == 3
    for before, after in zip(server.asked, server.asked[1:], strict=False):
        assert after["input"][: len(before["input"])] == before["input"]


async def test_the_model_reads_the_same_whether_search_is_in_this_process_or_behind_mcp(
    rag: Any, server: Any, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [wish("boss of ada"), wish("nobody knows this", place=1), ANSWER]
    seen: list[Any] = []
    for where in ("local", "mcp"):
        monkeypatch.setenv("RAG_SEARCH", where)
        server.answers, server.asked = [*script], []
        assert await rag.agent.run(task) == {"answer": ANSWER}
        seen.append([read(request) for request in server.asked])
    assert seen[0] == seen[1]
    assert json.dumps(seen[0][0][0]) == json.dumps(seen[1][0][0]), "in the same order, too"
    assert seen[0][-1][1][-1] == rag.search.NOTHING


def read(request: Any) -> Any:
    """The tools and the text of the results, which comes in parts over MCP."""
    outputs = [item["output"] for item in request["input"] if item.get("type") == "function_call_output"]
    return request["tools"], [
        output if isinstance(output, str) else "".join(part["text"] for part in output) for output in outputs
    ]


@pytest.mark.parametrize("call", [wish(3), wish('{"query": '), wish("{}"), wish('{"other": "ada"}')])
async def test_a_malformed_call_is_reported_to_the_model(rag: Any, server: Any, task: Any, call: Any) -> None:
    server.answers = [call, ANSWER]
    assert await rag.agent.run(task) == {"answer": ANSWER}
    assert server.asked[1]["input"][-1]["output"] == "error: search needs a query"


@pytest.mark.parametrize("call", [wish('{"query": '), wish("{}"), wish('{"other": "ada"}')])
async def test_a_malformed_call_is_reported_over_mcp_too(
    rag: Any, server: Any, task: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAG_SEARCH", "mcp")
    await test_a_malformed_call_is_reported_to_the_model(rag, server, task, call)


async def test_a_missing_tool_is_reported_to_the_model(rag: Any, server: Any, task: Any) -> None:
    server.answers = [wish("ada", tool="find"), ANSWER]
    assert await rag.agent.run(task) == {"answer": ANSWER}
    assert "find" in server.asked[1]["input"][-1]["output"]


async def test_an_agent_that_never_stops_searching_has_no_answer(
    rag: Any, server: Any, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [wish("boss of ada", place=place) for place in range(9)]
    assert await rag.agent.run(task) == {"answer": ""}
    assert len(server.asked) == rag.agent.MAX_TURNS
    monkeypatch.setenv("RAG_MAX_TURNS", "2")
    server.asked = []
    await rag.agent.run(task)
    assert len(server.asked) == 2
    assert rag.tasks.reward(task, {"answer": ""})["final"] == 0.0


async def test_a_search_that_raises_fails_the_attempt(rag: Any, server: Any) -> None:
    from agents import Agent, Runner

    def broken(query: str) -> Any:
        raise OSError("the index is gone")

    library = rag.search.Library(passages=("ada",), scorer=broken)
    server.answers = [wish("boss of ada"), ANSWER]
    with pytest.raises(Exception, match="the index is gone"):
        await Runner.run(Agent(name="researcher", tools=[rag.agent.search]), "who", context=library)
    assert len(server.asked) == 1


async def test_an_mcp_server_that_dies_in_the_middle_fails_the_attempt(
    rag: Any, server: Any, task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = tmp_path / "server.py"
    dying.write_text(
        "import os\nfrom mcp.server.mcpserver import MCPServer\nserver = MCPServer('library', log_level='CRITICAL')\n"
        "@server.tool()\ndef search(query: str) -> str:\n    os._exit(1)\nserver.run()\n"
    )
    monkeypatch.setattr(rag.agent, "SERVER", dying)
    monkeypatch.setenv("RAG_SEARCH", "mcp")
    server.answers = [wish("boss of ada"), ANSWER]
    with pytest.raises(Exception, match=r"(?i)closed|search"):
        await rag.agent.run(task)
    assert len(server.asked) == 1


async def test_the_gateway_renders_a_conversation_as_the_warm_start_has_shown_it(
    rag: Any, server: Any, tmp_path: Path
) -> None:
    from lightningrl.chat import ChatTemplate
    from lightningrl.dialects.base import Past
    from lightningrl.dialects.openai_responses import OpenAIResponses
    from lightningrl.warmstart.demonstrations import answers_of
    from lightningrl.warmstart.examples import examples_of

    shown = rag.demonstrations.demonstrations(seed=1, count=60)
    tokenizer = rag.warmstart.tokenizer_for([{"messages": d.messages} for d in shown])
    tokenizer.save_pretrained(tmp_path)
    template = ChatTemplate.load(tmp_path)
    for demonstration in shown[:5]:
        server.answers = [dict(message) for message in demonstration.messages if message["role"] == "assistant"]
        server.asked = []
        await rag.agent.run(rag.tasks.as_task(demonstration.question, "x")["input"])
        asked = OpenAIResponses().parse(server.asked[-1], Past())
        ids = template.render(asked.messages, tools=asked.tools)
        begun = list(demonstration.messages[:-1])
        assert ids == tokenizer.apply_chat_template(
            begun, tools=rag.warmstart.TOOLS, add_generation_prompt=True, return_dict=False
        )
        answers = answers_of({"messages": demonstration.messages, "tools": rag.warmstart.TOOLS})
        [[*_, last]] = examples_of([answers], template, max_length=384)
        assert list(last.prompt_ids) == ids


def test_the_agent_is_also_a_program(rag: Any, server: Any, task: Any) -> None:
    server.answers = [ANSWER]
    done = subprocess.run(
        [sys.executable, "agent.py"],
        cwd=rag.folder,
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert json.loads(done.stdout) == {"answer": ANSWER}


def test_the_agent_has_no_trace_of_training(rag: Any) -> None:
    for name in ("agent", "search", "server", "world", "names", "musique"):
        assert "lightningrl" not in (rag.folder / f"{name}.py").read_text().lower()
