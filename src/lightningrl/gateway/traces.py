"""`POST /v1/traces`: spans from an agent's own telemetry, over OTLP/HTTP
(https://opentelemetry.io/docs/specs/otlp/#otlphttp).

A span belongs to the attempt whose token came with it. Attempts that share a process also share its exporter, which has
no token. Then the attempt follows from the span itself: from its mark (set by `attach`), from the answer or tool call
that it names, or from other spans of its trace.

The answers of a branch that were played back have the ids that they had. Their spans get the branch's own calls.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightningrl.dialects.base import Refused
from lightningrl.errors import StoreError, StoreFailed
from lightningrl.gateway import http
from lightningrl.gateway.http import Incoming
from lightningrl.gateway.playback import played_back_as
from lightningrl.gateway.sessions import Sessions
from lightningrl.gateway.threads import in_thread
from lightningrl.store import Store
from lightningrl.tracing import otlp
from lightningrl.tracing.derived import TOOL_CALL_ID
from lightningrl.tracing.mark import MARK, mark_of, named
from lightningrl.types import Span

PROTOBUF, JSON = b"application/x-protobuf", b"application/json"
INVALID, UNAVAILABLE, UNAUTHENTICATED = 3, 14, 16
"""Codes of google.rpc.Code."""
TRACES_KEPT = 16384
"""Traces whose attempts are remembered."""
UNSIGNED_LIMIT = 8 * 1024 * 1024
"""Bytes of one export without a token: any program may send it."""
UNSIGNED_S = 5.0
"""Time for an export without a token to arrive. A slow sender must not block the others: they time out after 10 s."""
UNSIGNED_AT_ONCE = 2
"""Exports without a token that are read at the same time; others wait."""


class Traces:
    """Stores the spans that exporters send."""

    def __init__(self, store: Store, sessions: Sessions, *, prefixes: Iterable[str], shared: bool) -> None:
        """`prefixes`: those of call ids. `shared`: attempts share processes, so spans need no token."""
        self._store = store
        self._sessions = sessions
        self._shared = shared
        self._call_id = re.compile(rf"(?:{'|'.join(map(re.escape, prefixes))})(?P<attempt>.+)-\d+")
        self._unsigned = asyncio.Semaphore(UNSIGNED_AT_ONCE)
        self._attempts: OrderedDict[str, str | None] = OrderedDict()
        """Trace id → attempt id; None: several attempts are in the trace."""

    async def serve(self, incoming: Incoming) -> None:
        headers = incoming.scope["headers"]
        kind = next((value for name, value in headers if name == b"content-type"), PROTOBUF)
        kind = kind.partition(b";")[0].strip().lower()
        encoding: otlp.Encoding = "json" if kind == JSON else "protobuf"
        try:
            if kind not in (PROTOBUF, JSON):
                message = f"telemetry of type `{kind.decode('latin-1')}` is not known here"
                raise Refused(415, message, hint=f"send `{PROTOBUF.decode()}`")
            own = await self._own(incoming)
            if own is None:
                spans = await self._read_unsigned(incoming, encoding)
            else:
                spans = await _read(incoming, encoding, limit=http.BODY_LIMIT)
            rejected, why = await self._take(await self._renamed(await self._attributed(spans, own)))
            status, answer = 200, otlp.answer(encoding, rejected=rejected, message=why)
        except (otlp.BadTelemetry, Refused, StoreFailed) as error:
            status, code = _status(error)
            message = error.message if isinstance(error, Refused) else str(error)
            answer = otlp.refusal(encoding, code=code, message=message)
        kind = JSON if encoding == "json" else PROTOBUF
        headers = [(b"content-type", kind), (b"content-length", str(len(answer)).encode())]
        await incoming.send({"type": "http.response.start", "status": status, "headers": headers})
        await incoming.send({"type": "http.response.body", "body": answer})

    async def _read_unsigned(self, incoming: Incoming, encoding: otlp.Encoding) -> list[Span]:
        try:
            async with self._unsigned, asyncio.timeout(UNSIGNED_S):
                return await _read(incoming, encoding, limit=UNSIGNED_LIMIT)
        except TimeoutError as error:
            message = f"telemetry without a token has not arrived within {UNSIGNED_S:g} s"
            raise Refused(408, message, code="timeout") from error

    async def _own(self, incoming: Incoming) -> str | None:
        """The id of the attempt whose token came with the spans; None: no token came, and none is needed."""
        found = await self._sessions.attempt_of(incoming.caller())
        if found is None and not self._shared:
            hint = "set OTEL_EXPORTER_OTLP_TRACES_HEADERS to `x-api-key=<token>`, or send to `/r/<token>/v1/traces`"
            raise Refused(401, "no such token", code="invalid_api_key", hint=hint)
        return None if found is None else found[1].id

    async def _attributed(self, spans: Sequence[Span], own: str | None) -> list[Span]:
        """The spans with the ids of their attempts and calls, where known; `attempt_id` stays "" where it is not.

        Where attempts share an exporter, what a span says overrides the token: the exporter sends the queued spans of
        other attempts, too. So if one span belongs to another attempt, the token does not claim the remaining ones.
        """
        if not self._shared:
            return [_joined(span, own or "", self._attempt_of(_answer(span))) for span in spans]
        marks = await self._marks({_mark(span) for span in spans} - {""})
        joined: list[Span] = []
        for span in spans:
            marked = marks.get(_mark(span))
            caller = self._caller(span, marked or own)
            joined.append(_joined(span, marked or caller or "", caller))
        self._remember(joined)
        joined = [span if span.attempt_id else replace(span, attempt_id=self._neighbours(span)) for span in joined]
        if own is None or any(span.attempt_id not in ("", own) for span in joined):
            return joined
        return [replace(span, attempt_id=own) for span in joined]

    async def _renamed(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Spans that name an answer of another attempt get the call of their own attempt that played it back."""
        attempts = {span.attempt_id for span in spans if self._names_another(span)} - {""}
        if not attempts:
            return spans
        names = played_back_as(await self._store.calls(sorted(attempts)))
        return [
            replace(span, call_id=names.get((span.attempt_id, _answer(span) or "")))
            if self._names_another(span)
            else span
            for span in spans
        ]

    def _caller(self, span: Span, owner: str | None) -> str | None:
        """The attempt that the span's answer was given to. Branches get the answers of their trunk, whose own spans may
        be late: while one runs, it is unknown unless a mark or token names the `owner`.
        """
        found = self._attempt_of(_answer(span))
        if found is None or found == owner:
            return found
        branches = self._sessions.branches_of(found)
        if not branches:
            return found
        return owner if owner in branches else None

    def _names_another(self, span: Span) -> bool:
        return self._attempt_of(_answer(span)) not in (None, span.attempt_id)

    def _attempt_of(self, call_id: str | None) -> str | None:
        found = self._call_id.fullmatch(call_id or "")
        return found["attempt"] if found else None

    async def _marks(self, marks: set[str]) -> dict[str, str]:
        """Mark → attempt id. A mark that names no attempt is compared with those of the attempts in memory."""
        attempts = await self._store.attempts(sorted({named(mark).rpartition(".")[0] for mark in marks if named(mark)}))
        found = {mark_of(attempt.token_hash, attempt_id=attempt.id): attempt.id for attempt in attempts}
        if any(not named(mark) for mark in marks):
            found |= {mark_of(attempt.token_hash): attempt.id for attempt in self._sessions.attempts()}
        return found

    def _remember(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if span.attempt_id:
                known = self._attempts.setdefault(span.trace_id, span.attempt_id)
                self._attempts[span.trace_id] = known if known == span.attempt_id else None
        while len(self._attempts) > TRACES_KEPT:
            self._attempts.popitem(last=False)

    def _neighbours(self, span: Span) -> str:
        """The attempt that requested the span's tool call, or else that of its trace; "": unknown or ambiguous."""
        tool_id = span.attributes.get(TOOL_CALL_ID)
        requester = self._sessions.requester(tool_id) if tool_id else None
        return requester or self._attempts.get(span.trace_id) or ""

    async def _take(self, spans: Sequence[Span]) -> tuple[int, str]:
        """Returns (number of rejected spans, reasons)."""
        groups: dict[str, list[Span]] = {}
        for span in spans:
            groups.setdefault(span.attempt_id, []).append(span)
        unknown = len(groups.pop("", []))
        refused = [error for group in groups.values() for error in await self._append(group)]
        reasons = list(dict.fromkeys(refused))
        if unknown:
            hint = "send them with the attempt's token"
            reasons.insert(0, f"{unknown} spans name no call of a running attempt; hint: {hint}")
        return unknown + len(refused), "; ".join(reasons)

    async def _append(self, spans: Sequence[Span]) -> list[str]:
        """Store all spans at once; if that is refused, one by one, so that a bad one does not spoil the others.

        Returns the error messages.
        """
        try:
            await self._store.append(*spans)
        except StoreFailed:
            raise
        except StoreError as error:
            if len(spans) == 1:
                return [error.message]
            return [message for span in spans for message in await self._append([span])]
        return []


def _status(error: otlp.BadTelemetry | Refused | StoreFailed) -> tuple[int, int]:
    """(HTTP status, google.rpc.Code). Exporters repeat a request that was answered with 503."""
    if isinstance(error, StoreFailed):
        return 503, UNAVAILABLE
    status = error.status if isinstance(error, Refused) else 400
    return status, UNAUTHENTICATED if status == 401 else INVALID


async def _read(incoming: Incoming, encoding: otlp.Encoding, *, limit: int) -> list[Span]:
    return await in_thread(otlp.decode, await incoming.read(limit=limit), encoding)


def _joined(span: Span, attempt_id: str, caller: str | None) -> Span:
    """The span of this attempt. It names its call if `caller`, the attempt of that call, is the same."""
    return replace(span, attempt_id=attempt_id, call_id=_answer(span) if caller == attempt_id else None)


def _mark(span: Span) -> str:
    mark = span.attributes.get(MARK)
    return mark if isinstance(mark, str) else ""


def _answer(span: Span) -> str | None:
    """The id of the answer that an LLM span names."""
    return span.attributes.get(otlp.RESPONSE_ID) if span.kind == "llm" else None
