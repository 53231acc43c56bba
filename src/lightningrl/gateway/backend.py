"""What stands behind every request: the store, the chat template, the engines, and the settings of the run."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightningrl.chat import ChatTemplate
from lightningrl.dialects.base import Refused
from lightningrl.engine.base import Engine
from lightningrl.errors import StoreError, StoreFailed
from lightningrl.gateway.refusals import attempt_ended
from lightningrl.store import Store
from lightningrl.types import Attempt, Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    store: Store
    template: ChatTemplate
    engines: Mapping[str, Engine]
    """By policy."""
    max_length: int
    """Tokens of prompt and completion that the engines can hold."""
    strict: bool
    """Constrained decoding holds the arguments of strict tools to their schema."""

    async def record(self, attempt: Attempt, *calls: Call) -> None:
        """Store calls of `attempt`. Raises `Refused` if the attempt has ended meanwhile, and `StoreFailed`."""
        try:
            await self.store.append(*calls)
        except StoreFailed:
            raise
        except StoreError as error:
            found = await self.store.attempt_by_token(attempt.token)
            if found is not None and found[1].status != "running":
                raise attempt_ended() from error
            raise Refused(500, error.message, code="store_error", hint=error.hint) from error
