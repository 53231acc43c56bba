"""Where frameworks run tools, a recorded result takes the tool's place. One module for each framework.

The patches are installed by the first attempt of a process that plays tool results back. They do nothing in others:
each asks the attempt that the calling code belongs to. See docs/replayable.md for what they reach.
"""

from lightningrl.errors import UserError
from lightningrl.runner.patching import Patches, patch
from lightningrl.runner.tool_hooks import autogen, langchain, openai_agents, pydantic_ai

FRAMEWORKS: Patches = {
    "langchain_core.tools.base": langchain.patch,
    "agents.run_internal.tool_execution": openai_agents.patch,
    "autogen_agentchat.agents._assistant_agent": autogen.patch_assistant,
    "autogen_core.tools._base": autogen.patch_tools,
    "pydantic_ai.toolsets.function": pydantic_ai.patch_functions,
    "pydantic_ai.mcp": pydantic_ai.patch_mcp,
}
"""Module that runs tools → its patch."""


def install() -> None:
    """Patch the frameworks of this process, now or when they are imported. Idempotent. Raises `UserError` for a version
    of a framework that runs tools elsewhere.
    """
    try:
        patch(FRAMEWORKS)
    except KeyError as error:
        message = f"this version of a framework has no {error}, so its tool results cannot be played back"
        raise UserError(message, hint='say `replay.tools = "rerun"`, or use a version of docs/replayable.md') from error


__all__ = ["install"]
