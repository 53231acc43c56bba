"""No request that changes something is sent twice."""

import httpx

ONCE = ("/forward_backward", "/optim_step", "/save_weights", "/save_weights_for_sampler")
"""Ends of the paths of requests that change something each time they arrive, or fail the second time."""
UNKNOWN = 424
"""Status that the SDK does not retry: an answer is lost, and the service may have done what was asked."""


def takes_client(release: str) -> bool:
    """Whether this release of the SDK passes on an HTTP client of ours."""
    major, minor = release.split(".")[:2]
    return (int(major), int(minor)) < (0, 25)


class Once(httpx.AsyncBaseTransport):
    """Keeps the SDK from sending a request twice that the service may have taken the first time.

    The SDK repeats what failed, and numbers requests so that a service can tell. SkyRL 0.3 does not look at the
    numbers: it adds the gradient again, or makes an update of momentum alone.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith(ONCE):
            return await self._inner.handle_async_request(request)
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
            raise  # it never left
        except httpx.TransportError as error:
            return _unknown(request, str(error) or type(error).__name__)
        if response.status_code < 500 and response.status_code != 408:
            return response
        await response.aclose()
        return _unknown(request, f"status {response.status_code}")

    async def aclose(self) -> None:
        await self._inner.aclose()


def _unknown(request: httpx.Request, said: str) -> httpx.Response:
    detail = f"no answer to `{request.url.path.rpartition('/')[2]}` ({said}), so it is unknown whether it was done"
    return httpx.Response(UNKNOWN, json={"detail": detail}, request=request)
