"""An HTTP server that says who it is and what reached it. Run as a script: NAME PORT.

Test clients steer it by request headers: `x-test-refuse: a,b` (those engines answer 503), `x-test-reset: a` (cut the
connection before answering), `x-test-stream: KEY` (an event, then the end is held until POST /release?KEY).
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict

from aiohttp import web


def build(name: str) -> web.Application:
    released: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def release(request: web.Request) -> web.Response:
        released[request.query_string].set()
        return web.Response()

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if name in request.headers.get("x-test-reset", "").split(","):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if name in request.headers.get("x-test-refuse", "").split(","):
            return web.json_response({"engine": name, "refused": True}, status=503)
        if "x-test-stream" in request.headers:
            response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-engine": name})
            await response.prepare(request)
            await response.write(b"data: first\n\n")
            await released[request.headers["x-test-stream"]].wait()
            await response.write(b"data: [DONE]\n\n")
            return response
        return web.json_response({"engine": name, "headers": dict(request.headers), "body_bytes": len(body)})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/release", release)
    app.router.add_route("*", "/{path:.*}", answer)
    return app


if __name__ == "__main__":
    web.run_app(build(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), print=None, backlog=4096)
