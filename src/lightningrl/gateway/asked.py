"""One call that an agent asks for, as the works see it that answer it."""

from dataclasses import dataclass

from lightningrl.dialects.base import ChatRequest, Dialect
from lightningrl.gateway.sessions import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, and where it comes from."""

    session: Session
    dialect: Dialect
    request: ChatRequest
    policy: str
    """The policy that its route names, or the upstream."""
    agent: str
    """The agent's role."""
    request_id: str
    """The name of the request; "": it has none. See `identity.REQUEST`."""

    def call_id(self, index: int) -> str:
        """The id of a call with this index among those of the attempt."""
        return f"{self.dialect.id_prefix}{self.session.attempt.id}-{index}"
