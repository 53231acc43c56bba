"""Runs a command, and writes down what the gateway answers it: `python tap.py FILE CMD…`, inside `lightningrl run`.

The command calls a proxy, which passes each request on and adds a line of JSON to FILE for each answer.
"""

import asyncio
import json
import os
import sys

from aiohttp import ClientSession, ClientTimeout, web

GATEWAY = os.environ["ANTHROPIC_BASE_URL"]
HOP_BY_HOP = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}


async def main(file: str, command: list[str]) -> int:
    async with ClientSession(timeout=ClientTimeout(total=60), auto_decompress=False) as client:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            sent = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
            data = await request.read()
            async with client.request(request.method, GATEWAY + request.path_qs, headers=sent, data=data) as answer:
                kept = {
                    name: answer.headers[name] for name in ("content-type", "x-should-retry") if name in answer.headers
                }
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                body = bytearray()
                async for piece in answer.content.iter_any():
                    body += piece
                    await response.write(piece)
            line = json.dumps([request.method, request.path_qs, answer.status, kept, body.decode()])
            with open(file, "a", encoding="utf-8") as lines:
                lines.write(line + "\n")
            return response

        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        [(host, port)] = [address[:2] for address in runner.addresses]
        there = f"http://{host}:{port}"
        environment = {name: value.replace(GATEWAY, there) for name, value in os.environ.items()}
        child = await asyncio.create_subprocess_exec(*command, env=environment)
        code = await child.wait()
        await runner.cleanup()
        return code


sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2:])))
