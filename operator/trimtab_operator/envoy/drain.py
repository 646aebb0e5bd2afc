"""Beside an Envoy in its pod: when the pod goes, lets Envoy's streams finish, and Envoy then go at once.

    python -m trimtab_operator.envoy.drain serve --bind POD_IP    runs all the time
    python -m trimtab_operator.envoy.drain begin                  preStop of this container

Envoy by itself ends as soon as it is told to, with every stream that it carries. So its own preStop asks `serve` for
/drained, which answers when no request is left or the longest stream's time is over; meanwhile the answers that Envoy
gives tell clients to close their connections. Both hooks run at once when the pod is deleted, and Kubernetes ends this
container, a native sidecar, after Envoy.

The one rule: only `begin`, which nobody outside of the pod can run, makes Envoy drain; /drained merely waits. Standard
library alone, since it runs beside every Envoy.
"""

import argparse
import http.client
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

PORT: Final = 9903
POLL_S: Final = 0.5
SETTLE_S: Final = 5.0
"""How long Envoy serves on at least: for so long others may not know yet that the pod is going."""
WAITING_MAX: Final = 8
"""Requests for /drained at once; more are turned away with 503."""
ADMIN_TIMEOUT_S: Final = 2.0
STATS: Final = "/stats?filter=%5E(server.live%7Chttp.front.downstream_rq_active)$"


class Envoy:
    """An Envoy's admin API at `host:port`, on this pod's loopback."""

    def __init__(self, address: str) -> None:
        self._address = address

    def begin_draining(self) -> None:
        """From now on answers ask for their connection's end, and Envoy counts as not ready. Raises OSError."""
        self._ask("POST", "/healthcheck/fail")

    def stats(self) -> Mapping[str, int]:
        """`server.live` and `http.front.downstream_rq_active`. Raises OSError."""
        lines = [line.partition(": ") for line in self._ask("GET", STATS).splitlines()]
        return {name: int(value) for name, _, value in lines if value.isdigit()}

    def _ask(self, method: str, path: str) -> str:
        connection = http.client.HTTPConnection(self._address, timeout=ADMIN_TIMEOUT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except http.client.HTTPException as error:
            raise OSError(f"Envoy's admin API: {error!r}") from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise OSError(f"Envoy's admin API answers {path} with {response.status}")
        return text


def wait_until_drained(envoy: Envoy, *, settle_s: float, streams_max_s: float) -> str:
    """Returns why the wait is over: `drained`, `gone` (no Envoy any more) or `time is over`."""
    started_s = time.monotonic()
    while (waited_s := time.monotonic() - started_s) < settle_s + streams_max_s:
        try:
            stats = envoy.stats()
        except OSError:
            return "gone"
        is_draining = stats.get("server.live") == 0
        if is_draining and waited_s >= settle_s and not stats.get("http.front.downstream_rq_active"):
            return "drained"
        time.sleep(POLL_S)
    return "time is over"


def serve(envoy: Envoy, *, bind: str, port: int, settle_s: float, streams_max_s: float) -> None:
    """/drained and /healthz until SIGTERM."""
    places = threading.BoundedSemaphore(WAITING_MAX)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/healthz":
                self._answer(200, "alive")
            elif self.path != "/drained":
                self._answer(404, "nothing is here")
            elif not places.acquire(blocking=False):
                self._answer(503, "too many wait already")
            else:
                try:
                    self._answer(200, wait_until_drained(envoy, settle_s=settle_s, streams_max_s=streams_max_s))
                finally:
                    places.release()

        def _answer(self, status: int, text: str) -> None:
            body = f"{text}\n".encode()
            self.send_response(status)
            self.send_header("content-type", "text/plain")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            if self.path != "/healthz":
                print(f"envoy-drain: {format % args}", file=sys.stderr, flush=True)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET

    with Server((bind, port), Handler) as server:
        # From another thread, because `shutdown` waits for this one.
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
        server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="trimtab_operator.envoy.drain", allow_abbrev=False)
    parser.add_argument("what", choices=("serve", "begin"))
    parser.add_argument("--admin", default="127.0.0.1:9901", metavar="HOST:PORT", help="Envoy's admin API")
    parser.add_argument("--bind", default="0.0.0.0", help="address of /drained and /healthz")
    parser.add_argument("--port", type=int, default=PORT, help="their port")
    parser.add_argument("--settle", type=float, default=SETTLE_S, metavar="S", help="seconds to serve on at least")
    parser.add_argument("--streams-max", type=float, default=3600.0, metavar="S", help="seconds for streams to finish")
    options = parser.parse_args(arguments)
    envoy = Envoy(options.admin)
    if options.what == "begin":
        try:
            envoy.begin_draining()
        except OSError as error:
            print(f"envoy-drain: {error}", file=sys.stderr)
            return 1
        return 0
    try:
        serve(envoy, bind=options.bind, port=options.port, settle_s=options.settle, streams_max_s=options.streams_max)
    except OSError as error:
        print(f"envoy-drain: --bind {options.bind} --port {options.port}: {error}; give others", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
