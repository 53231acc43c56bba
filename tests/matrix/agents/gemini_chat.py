"""Google's SDK: a chat with automatic function calling."""

import sys

from google import genai
from google.genai import types
from weather import AGAIN, QUESTION, answer, forecast

client = genai.Client()
chat = client.chats.create(
    model="gemini-2.5-flash",
    config=types.GenerateContentConfig(system_instruction="You know the weather.", tools=[forecast]),
)
for question in (QUESTION, AGAIN):
    if "stream" in sys.argv:
        for _ in chat.send_message_stream(question):
            pass
    else:
        chat.send_message(question)
    turns = chat.get_history()
    last = max(place for place, turn in enumerate(turns) if turn.role == "user")
    answer("".join(part.text or "" for turn in turns[last:] if turn.role == "model" for part in turn.parts))
