"""Copies of calls, executed: bash with curl, and the real SDKs, against a real gateway."""

import asyncio
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lightningrl.dialects.recorded import Reader
from lightningrl.look.copies import APIS, Copies, copies_of
from lightningrl.types import Call
from tests.cli.test_rollouts import call
from tests.gateway.conftest import Stage, stage, template  # noqa: F401
from tests.look.test_tokens import ATTEMPT

HOSTILE = "\n".join(
    [
        'it\'s "quoted" $(touch pwned) `touch pwned` ${HOME} \\ \\n !x %s {x}',
        "REQUEST",
        "''' \"\"\" '; touch pwned; '",
        "\U0001f9ea 你好 \u202e\u2028\x9b31m\x1b[2J\t end",
    ]
)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DESCRIBED = {"name": "weather", "description": HOSTILE}
PATHS = {
    "openai.chat": "/v1/chat/completions",
    "openai.completions": "/v1/completions",
    "openai.responses": "/v1/responses",
    "anthropic.messages": "/v1/messages",
    "google.gemini": "/v1beta/models/m:generateContent",
}
USER = {"role": "user", "content": HOSTILE}
REQUESTS: dict[str, dict[str, Any]] = {
    "openai.chat": {
        "model": "m",
        "messages": [USER],
        "tools": [{"type": "function", "function": {**DESCRIBED, "parameters": WEATHER}}],
        "temperature": 0.5,
        "top_k": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "openai.completions": {"model": "m", "prompt": HOSTILE, "max_tokens": 20, "top_k": 5},
    "openai.responses": {
        "model": "m",
        "input": [USER],
        "tools": [{"type": "function", **DESCRIBED, "parameters": WEATHER, "strict": False}],
        "top_k": 5,
    },
    "anthropic.messages": {
        "model": "m",
        "max_tokens": 50,
        "temperature": 0.5,
        "messages": [USER],
        "tools": [{**DESCRIBED, "input_schema": WEATHER}],
    },
    "google.gemini": {
        "contents": [{"role": "user", "parts": [{"text": HOSTILE}]}],
        "systemInstruction": {"parts": [{"text": HOSTILE}]},
        "generationConfig": {"temperature": 0.5, "maxOutputTokens": 50, "stopSequences": ["x'y"]},
        "tools": [{"functionDeclarations": [{**DESCRIBED, "parametersJsonSchema": WEATHER}]}],
    },
}
WISH = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>'

pytestmark = pytest.mark.filterwarnings(
    "ignore:Inheritance class AiohttpClientSession:DeprecationWarning"
)  # the SDK's own


async def recorded(stage: Stage, dialect: str, token: str) -> Call:  # noqa: F811
    """The call that the dialect's request makes."""
    async with httpx2.AsyncClient(base_url=stage.url, headers={"Authorization": f"Bearer {token}"}) as client:
        answer = await client.post(PATHS[dialect], json=REQUESTS[dialect])
        assert answer.status_code == 200, answer.text
    attempt = await stage.store.attempt_by_token(token)
    assert attempt is not None
    return (await stage.calls(attempt[1]))[-1]


def copied(call: Call) -> Copies:
    copies = copies_of(call, Reader().answer(call))
    assert copies is not None
    return copies


def environment(stage: Stage, token: str) -> dict[str, str]:  # noqa: F811
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), token)
    return {
        **keys,
        "OPENAI_BASE_URL": f"{stage.url}/v1",
        "ANTHROPIC_BASE_URL": stage.url,
        "GOOGLE_GEMINI_BASE_URL": stage.url,
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize("dialect", APIS)
async def test_curl_sends_the_same_request(stage: Stage, dialect: str, shell: str, tmp_path: Path) -> None:  # noqa: F811
    attempt = await stage.begin()
    call = await recorded(stage, dialect, attempt.token)
    process = await asyncio.create_subprocess_exec(
        shell,
        "-c",
        copied(call).curl,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": "/h", "LC_ALL": "C.UTF-8", **environment(stage, attempt.token)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0 and not errors, errors
    again = (await stage.calls(attempt))[-1]
    assert again.index == call.index + 1 and again.request == call.request and b"error" not in told.lower()[:20]
    assert not list(tmp_path.iterdir()), "nothing in the request was executed"


@pytest.mark.parametrize("says", ["hello", WISH])
@pytest.mark.parametrize("dialect", APIS)
async def test_python_sends_the_same_request_and_the_test_passes_for_the_same_answer(
    stage: Stage,  # noqa: F811
    dialect: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage.says(says)
    attempt = await stage.begin()
    call = await recorded(stage, dialect, attempt.token)
    copies = copied(call)
    monkeypatch.chdir(tmp_path)
    for name, value in environment(stage, attempt.token).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)
    (tmp_path / "copy.py").write_text(copies.python)
    await asyncio.to_thread(runpy.run_path, str(tmp_path / "copy.py"))
    assert ("hello" if says == "hello" else "weather") in capsys.readouterr().out
    sent = {name: value for name, value in call.request.items() if not name.startswith("stream")}
    assert meaning((await stage.calls(attempt))[-1].request) == meaning(sent)
    (tmp_path / "test_copy.py").write_text(copies.test)
    found = await asyncio.to_thread(runpy.run_path, str(tmp_path / "test_copy.py"))
    (test,) = [value for name, value in found.items() if name.startswith("test_")]
    await asyncio.to_thread(test)
    stage.says(WISH if says == "hello" else "hello")
    if dialect != "openai.completions":  # it has no tools: both answers are text
        with pytest.raises(AssertionError):
            await asyncio.to_thread(test)
    assert {path.name for path in tmp_path.iterdir()} <= {"copy.py", "test_copy.py", "__pycache__"}


def meaning(request: Any) -> Any:
    """Google's SDK writes one field in another case, which means the same."""
    return json.loads(json.dumps(request).replace("parameters_json_schema", "parametersJsonSchema"))


def test_a_gemini_signature_becomes_bytes() -> None:
    part = {"text": "x", "thoughtSignature": "aGk="}
    one = call(ATTEMPT, 0, prompt=[1], said=[2], dialect="google.gemini", request={"model": "m", "contents": [part]})
    copies = copies_of(one, None)
    assert copies is not None and "b'hi'" in copies.python and "aGk=" in copies.curl


def test_a_format_of_a_plugin_has_no_copies() -> None:
    assert copies_of(call(ATTEMPT, 0, prompt=[1], said=[2], dialect="my.own"), None) is None


def test_terminal_controls_are_escaped() -> None:
    request = {"model": "m", "messages": [{"role": "user", "content": HOSTILE}]}
    copies = copies_of(call(ATTEMPT, 0, prompt=[1], said=[2], request=request), None)
    assert copies is not None
    for text in copies.as_json().values():
        assert all(character == "\n" or character.isprintable() for character in text)
        assert "\U0001f9ea 你好" in text
