"""Spans of an attempt are to be there when it ends: whatever its process still holds back is sent off, if anybody traces in it at all."""

import asyncio
import contextvars
import sys
from typing import Any

FLUSH_S = 2.0
"""What sending may take. A gateway on this machine takes milliseconds; a collector that is gone must not cost an attempt."""


async def flush_spans() -> None:
    """Does nothing where the SDK of OpenTelemetry was never imported."""
    sdk, api = sys.modules.get("opentelemetry.sdk.trace"), sys.modules.get("opentelemetry.trace")
    if sdk is None or api is None:
        return
    provider = api.get_tracer_provider()
    if isinstance(provider, sdk.TracerProvider):
        # In a context of its own: the queue holds spans of other attempts, too, and they must not go under the name of this one.
        await asyncio.create_task(_flushed(provider), context=contextvars.Context())


async def _flushed(provider: Any) -> None:
    flushing = asyncio.ensure_future(asyncio.to_thread(provider.force_flush, int(FLUSH_S * 1000)))
    done, _ = await asyncio.wait({flushing}, timeout=FLUSH_S)
    for task in done:
        task.exception()  # an exporter that breaks is not the attempt's failure
