"""Which token ids does the engine read? Renders and tokenizes prompts without blocking other requests."""

import asyncio
from collections.abc import Sequence

from lightningrl.chat import ChatTemplate, Prompt
from lightningrl.chat.encoder import LongText, TooManyTokens, beforehand
from lightningrl.dialects.base import ChatRequest, Refused
from lightningrl.gateway.http import Receive, while_there
from lightningrl.gateway.sessions import Session
from lightningrl.gateway.threads import in_thread

LONG_AT_ONCE = 2
"""Long texts that are tokenized at the same time. Each takes one core, and 260 bytes a token meanwhile."""

TEXTS = 4
"""Most texts that one prompt is tokenized in: a suffix that turns out not to fit, then a beginning and a rest."""


class Prompts:
    """Makes prompts of up to `most` tokens."""

    def __init__(self, template: ChatTemplate, *, most: int) -> None:
        self._template = template
        self._most = most
        self._turns = asyncio.Semaphore(LONG_AT_ONCE)

    async def of(self, session: Session, request: ChatRequest, receive: Receive) -> Sequence[Prompt]:
        """The prompt of the messages, or the raw prompts of the request.

        Long texts are tokenized in a thread first; then the prompt is made of the results. Raises `Refused` if a text
        is far too long, `BadConversation`, and `Gone`.
        """
        found: dict[str, list[int]] = {}
        for _ in range(TEXTS * max(1, len(request.prompts))):
            try:
                with beforehand(found):
                    return _prompts(session, request)
            except LongText as long:
                found[long.text] = await while_there(receive, self._tokenized(long.text))
        return _prompts(session, request)  # the template renders another text each time

    async def count(self, session: Session, request: ChatRequest, receive: Receive) -> int:
        """The number of prompt tokens. Raises as `of` does."""
        return sum(len(prompt.ids) for prompt in await self.of(session, request, receive))

    async def _tokenized(self, text: str) -> list[int]:
        await self._turns.acquire()  # a client that goes away before its turn costs nothing
        work = asyncio.ensure_future(in_thread(self._template.encode_long, text, most=self._most))
        work.add_done_callback(lambda _: self._turns.release())
        try:
            return await asyncio.shield(work)  # if cancelled: the thread runs on, and keeps its turn
        except TooManyTokens as error:
            raise too_long(f"more than `{self._most}` tokens", most=self._most) from error


def too_long(length: str, *, most: int) -> Refused:
    message, hint = f"the prompt has {length}, at most `{most}` fit", "shorten it, or raise `engine.max_length`"
    return Refused(400, message, code="context_length_exceeded", param="messages", hint=hint)


def _prompts(session: Session, request: ChatRequest) -> Sequence[Prompt]:
    if request.prompts:
        return [session.tree.prompt_raw(prompt) for prompt in request.prompts]
    return [session.tree.prompt(request.messages, tools=request.tools)]
