"""An agent's code asks its gateway: whose attempt is it, and a request with that attempt's token."""

import http.client
import os

from lightningrl.errors import UserError
from lightningrl.runner.attach import Identity, gateway_of, identity
from lightningrl.runner.environment import PLACEHOLDER_KEY

TOKEN = "lrl-"
"""Prefix of an attempt's token."""
TIMEOUT_S = 10.0


def caller() -> Identity | None:
    """The attached attempt, or the one that the environment names. None outside of an attempt. Raises `UserError` in a
    thread that belongs to some attempt, but does not know to which.
    """
    attached = identity.get()
    if attached is not None:
        return attached
    token, base_url = os.environ.get("OPENAI_API_KEY", ""), os.environ.get("OPENAI_BASE_URL", "")
    if token == PLACEHOLDER_KEY:
        raise UserError(
            "cannot tell which attempt this code belongs to",
            hint="in a thread that you start, call `lightningrl.attach` first",
        )
    return Identity(token=token, gateway=gateway_of(base_url)) if token.startswith(TOKEN) and base_url else None


def ask(asker: Identity, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body of the gateway's answer. Blocks. Raises `OSError` or `http.client.HTTPException`."""
    gateway = asker.gateway
    headers = {"authorization": f"Bearer {asker.token}", "content-type": "application/json"}
    kind = http.client.HTTPSConnection if gateway.scheme == "https" else http.client.HTTPConnection
    connection = kind(gateway.hostname or "", gateway.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, f"{gateway.path}{path}", body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
