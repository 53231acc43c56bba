"""A program that writes calls until it is killed, and prints the id of each when it is acknowledged.

Arguments: the URL of a store, the id of a rollout.
"""

WRITER = """
import asyncio, sys
from lightningrl.store import open_store
from lightningrl.store.conformance import begin, call

async def branch(store, attempt, lane):
    parent, prompt, index = None, [lane], lane
    while True:
        record = call(attempt, index, prompt, [index, lane], parent=parent)
        await store.append(record)
        print(record.id, flush=True)
        parent, prompt, index = record.id, [*prompt, index, lane, 7], index + 4

async def main():
    store = await open_store(sys.argv[1], exclusive=True)
    attempt = await begin(store, sys.argv[2])
    await asyncio.gather(*(branch(store, attempt, lane) for lane in range(4)))

asyncio.run(main())
"""
