"""Spans of an attempt are to be there when it ends: whatever its process still holds back is sent off, if anybody
traces in it at all.
"""

import asyncio
import contextvars
import sys
from typing import Protocol, runtime_checkable

FLUSH_S = 2.0
"""What sending may take. A gateway on this machine takes milliseconds; a collector that is gone must not cost an
attempt.
"""


@runtime_checkable
class Provider(Protocol):
    """A tracer provider of OpenTelemetry's SDK, or one that wraps it, as Logfire's does."""

    def force_flush(self, timeout_millis: int) -> bool: ...


async def flush_spans() -> None:
    """Does nothing where OpenTelemetry was never imported, or nobody has set it up."""
    api = sys.modules.get("opentelemetry.trace")
    provider = None if api is None else api.get_tracer_provider()
    if isinstance(provider, Provider):
        # In a context of its own: the queue holds spans of other attempts, too, and they must not go under the name of
        # this one.
        await asyncio.create_task(_flushed(provider), context=contextvars.Context())


async def _flushed(provider: Provider) -> None:
    flushing = asyncio.ensure_future(asyncio.to_thread(provider.force_flush, int(FLUSH_S * 1000)))
    done, _ = await asyncio.wait({flushing}, timeout=FLUSH_S)
    for task in done:
        task.exception()  # an exporter that breaks is not the attempt's failure
