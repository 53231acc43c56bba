"""Settings are shown without secrets, whatever a recipe holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import Config
from lightningrl.look.redaction import HIDDEN, changed_settings, redacted
from lightningrl.recipe import make_config

S = "s3cr3t-Value9"
BASE: dict[str, Any] = {
    "name": "x",
    "agent": {"entry": "a:b", "reward": "a:c"},
    "tasks": {"source": "a:d"},
    "model": {"path": "m"},
}


def config(**sections: Any) -> Config:
    tree = json.loads(json.dumps(BASE))
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return make_config(tree, [], folder=Path("/r"), where="test")


def command(*words: str) -> dict[str, Any]:
    return {"agent": {"entry": None, "command": ["prog", *words]}}


SECRETS: dict[str, dict[str, Any]] = {
    "the password of the store": {"store": {"url": f"postgresql://me:{S}@db/x"}},
    "a password with signs": {"store": {"url": f"postgresql://me:{S}@@db/x"}},
    "the password in a query": {"store": {"url": f"postgresql://db/x?user=me&password={S}&schema=a"}},
    "a password in a query of TLS": {"store": {"url": f"postgresql://db/x?sslpassword={S}"}},
    "an environment value": {"agent": {"env": {"ANYTHING": S}}},
    "an environment value in a URL": {"agent": {"env": {"DATABASE_URL": f"mysql://me:{S}@db"}}},
    "a URL of an upstream": {"upstreams": {"far": {"url": f"https://me:{S}@host/v1"}}},
    "a token in place of a user": {"upstreams": {"far": {"url": f"https://{S}@host/v1"}}},
    "a key in the query of an upstream": {"upstreams": {"far": {"url": f"https://host/v1?key={S}&x=1"}}},
    "a signed URL": {"tasks": {"source": f"https://host/t.jsonl?X-Amz-Signature={S}"}},
    "a URL of an engine": {"engine": {"urls": [f"http://me:{S}@host:1"]}},
    "a flag and its value": {"engine": {"flags": ["--api-key", S]}},
    "a flag with its value": {"engine": {"flags": [f"--hf-token={S}"]}},
    "a header": command("-H", f"Authorization: Bearer {S}"),
    "a header of another kind": command("-H", f"X-Api-Key: {S}"),
    "a bearer alone": command(f"bearer {S}"),
    "a basic login": command("-H", f"authorization: Basic {S}"),
    "a cookie": command("-H", f"Cookie: {S}"),
    "JSON": command(f'{{"apiKey": "{S}", "x": 1}}'),
    "an assignment": command(f"OPENAI_API_KEY={S} run"),
    "a connection string": command(f"host=db user=me password={S} dbname=x"),
    "a URL inside a command": command("sh", "-c", f"curl https://me:{S}@host/"),
    "words in quotes": command(f"PASSWORD='two {S} words' run"),
    "a password with a slash": {"store": {"url": f"postgresql://me:a/{S}@db/x"}},
    "a login of curl": command("sh", "-c", f"curl -u me:{S} https://x"),
    "a login as a word": command("curl", "-u", f"me:{S}"),
    "a personal access token": command(f"GITHUB_PAT={S} run"),
    "a value of a secret": command(f"client_secret_value={S}"),
    "an option of a credit": {"algorithm": {"credit": "a:c", "credit_options": {"api_key": S}}},
    "a policy's option": {"policies": {"policy": {"algorithm": {"credit": "a:c", "credit_options": {"token": S}}}}},
    "a URL of a policy's model": {"policies": {"policy": {"model": {"path": f"https://me:{S}@host/m"}}}},
    "a public address with a password": {"gateway": {"public_url": f"https://me:{S}@host"}},
}
TOKENS = [
    "sk-proj-abcdefghijklmnop1234",
    "hf_abcdefghijklmnopqrstuv",
    "ghp_abcdefghijklmnopqrstuvwx",
    "AKIAABCDEFGHIJKLMNOP",
    "xoxb-1234567890-abcdefghij",
    "lrl-worker-abcdefghijklmnop",
]
"""Forms of well-known tokens."""


@pytest.mark.parametrize("kind", SECRETS)
def test_no_secret_is_shown(kind: str) -> None:
    given = config(**SECRETS[kind])
    assert S in json.dumps(given.model_dump(mode="json")), "the test is about something"
    for shown in (redacted(given), changed_settings(given)):
        text = json.dumps(shown, ensure_ascii=False)
        assert S not in text and HIDDEN in text, text


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_are_known_by_their_form(token: str) -> None:
    assert token not in json.dumps(redacted(config(**command("use", token))))


def test_the_value_of_an_upstreams_key_is_hidden_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_KEY", "plainword")
    given = config(upstreams={"far": {"url": "https://host", "key_env": "FAR_KEY"}}, **command("plainword"))
    shown = redacted(given)
    assert shown["upstreams"]["far"]["key_env"] == "FAR_KEY", "its name is no secret"
    assert "plainword" not in json.dumps(shown)


def test_the_rest_stays_as_it_is() -> None:
    given = config(
        warmstart={"tokenizer": "a:tokenizer_for"},
        engine={"flags": ["--max-num-batched-tokens", "4096"], "urls": ["http://host:8000/v1/@x"]},
        store={"url": "postgresql://me@db:5432/x?schema=a"},
        agent={"timeout_s": 5.0, "max_tokens": 7},
    )
    assert redacted(given) == given.model_dump(mode="json")


def test_only_settings_that_differ_are_listed() -> None:
    given = config(loop={"steps": 3, "group_size": 8}, preset="grpo")
    found = changed_settings(given)
    assert found["loop.steps"] == 3 and found["preset"] == "grpo" and "loop.group_size" not in found
    assert "root" not in found and found["agent.entry"] == "a:b"
