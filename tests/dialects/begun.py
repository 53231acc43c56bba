"""A reply without choices, as a stream begins with it."""

from lightningrl.dialects.base import ChatRequest, Reply


def begun(request: ChatRequest, reply_id: str = "x_1") -> Reply:
    return Reply(id=reply_id, request=request, created=7, prompt_tokens=0, reused_tokens=0, choices=())
