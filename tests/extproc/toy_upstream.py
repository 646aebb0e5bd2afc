"""An HTTP server in an engine's place: it tells what it received, and streams for as long as a test lets it."""

import asyncio
import hashlib
import json
from typing import Any

from aiohttp import web

BODY_BYTES_MAX = 64 << 20


class ToyUpstream:
    """One server on loopback. `address` is known after `start`."""

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[dict[str, Any]] = []
        self.release = asyncio.Event()
        """Streams with `"hold": true` in the body send their first event only after this."""
        self.finish = asyncio.Event()
        """Streams with `"linger": true` end only after this."""
        self.streaming_count = 0
        self.status = 200
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        self.release.set()
        self.finish.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(
            {
                "endpoint": self.address,
                "method": request.method,
                "path": request.path,
                "headers": {name.lower(): value for name, value in request.headers.items()},
                "body_bytes": len(body),
                "body_sha256": hashlib.sha256(body).hexdigest(),
            }
        )
        wanted = _object(body)
        if wanted.get("stream"):
            return await self._stream(request, wanted)
        answer: dict[str, Any] = {"id": "resp_toy" if "responses" in request.path else "chat_toy"}
        answer |= {"seen": self.requests[-1], "usage": {"prompt_tokens": 96}}
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 64}
        return web.json_response(answer, status=self.status)

    async def _stream(self, request: web.Request, wanted: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.streaming_count += 1
        try:
            if wanted.get("hold"):
                await self.release.wait()
            for index in range(int(wanted.get("events", 3))):
                data = json.dumps({"id": "chat_toy", "choices": [{"delta": {"content": f"token {index}"}}]})
                await response.write(f"data: {data}\n\n".encode())
            if wanted.get("linger"):
                await self.finish.wait()
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            self.streaming_count -= 1
        return response


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
