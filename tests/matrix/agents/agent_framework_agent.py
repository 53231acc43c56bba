"""Microsoft's Agent Framework: responses with server-side state, or with `chat` chat completions."""

import asyncio
import sys

from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from weather import AGAIN, QUESTION, answer, forecast


async def main():
    client = OpenAIChatCompletionClient(model="gpt-5") if "chat" in sys.argv else OpenAIChatClient(model="gpt-5")
    agent = client.as_agent(name="forecaster", instructions="You know the weather.", tools=[forecast])
    session = agent.create_session()
    for question in (QUESTION, AGAIN):
        if "stream" in sys.argv:
            stream = agent.run(question, session=session, stream=True)
            async for _ in stream:
                pass
            response = await stream.get_final_response()
        else:
            response = await agent.run(question, session=session)
        answer(response.messages[-1].text)


asyncio.run(main())
