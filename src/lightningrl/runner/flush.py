"""Sends the spans that this process still buffers, so that an attempt's spans arrive before its end."""

import asyncio
import contextvars
import sys
from typing import Protocol, runtime_checkable

FLUSH_S = 2.0
"""Timeout. A gateway on this machine takes milliseconds; an unreachable collector must not cost an attempt."""


@runtime_checkable
class Provider(Protocol):
    """A tracer provider of OpenTelemetry's SDK, or one that wraps it, as Logfire's does."""

    def force_flush(self, timeout_millis: int) -> bool: ...


async def flush_spans() -> None:
    """Does nothing if OpenTelemetry was never imported or set up."""
    api = sys.modules.get("opentelemetry.trace")
    provider = None if api is None else api.get_tracer_provider()
    if isinstance(provider, Provider):
        # In an empty context: the queue also holds spans of other attempts; this attempt's token must not go with them.
        await asyncio.create_task(_flushed(provider), context=contextvars.Context())


async def _flushed(provider: Provider) -> None:
    flushing = asyncio.ensure_future(asyncio.to_thread(provider.force_flush, int(FLUSH_S * 1000)))
    done, _ = await asyncio.wait({flushing}, timeout=FLUSH_S)
    for task in done:
        task.exception()  # a broken exporter is not the attempt's failure
