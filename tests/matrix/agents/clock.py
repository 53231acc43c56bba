"""An agent that cannot be replayed: its second prompt has the time."""

import time

from openai import OpenAI
from weather import QUESTION, answer

client = OpenAI()
messages = [{"role": "user", "content": QUESTION}]
for _ in range(2):
    message = client.chat.completions.create(model="gpt-5", messages=messages).choices[0].message
    messages += [message, {"role": "user", "content": f"It is {time.time_ns()} now. Go on."}]
answer(message.content)
