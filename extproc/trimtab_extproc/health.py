"""gRPC health, under every name that gateways and kubelets ask for, without a server.

The one rule: "liveness" says that the process runs; every other name says whether it can choose: NOT_SERVING until the
pool is known, and again from the moment that the process is told to stop.
"""

from collections.abc import Callable

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from trimtab_extproc.errors import ProtocolError
from trimtab_extproc.wire import SERVICE

HEALTH_SERVICE = "grpc.health.v1.Health"
LIVENESS = "liveness"
READINESS_NAMES = ("", "readiness", SERVICE, "inference-extension")

_Response = health_pb2.HealthCheckResponse
Tell = Callable[[bytes], None]
"""Takes an encoded answer; returns at once."""


class Health:
    """Answers checks and keeps watchers up to date, for any number of servers. Messages are bytes."""

    def __init__(self) -> None:
        self._is_ready = False
        self._watchers: dict[object, Tell] = {}

    def set_ready(self, is_ready: bool) -> None:
        """Whether choices can be made. Watchers are told only of changes."""
        if is_ready == self._is_ready:
            return
        self._is_ready = is_ready
        for tell in list(self._watchers.values()):
            tell(self._readiness())

    def check(self, request: bytes) -> bytes | None:
        """The answer to a HealthCheckRequest; None: nobody has that name. Raises ProtocolError."""
        name = _name(request)
        if name == LIVENESS:
            return _encoded(_Response.SERVING)
        return self._readiness() if name in READINESS_NAMES else None

    def watch(self, request: bytes, tell: Tell) -> Callable[[], None]:
        """Tells the present status and every change; what is returned ends that. Raises ProtocolError."""
        name, watcher = _name(request), object()
        if name in READINESS_NAMES:
            self._watchers[watcher] = tell
            tell(self._readiness())
        else:
            # A name that may yet come to life, by the protocol; here none does.
            tell(_encoded(_Response.SERVING if name == LIVENESS else _Response.SERVICE_UNKNOWN))

        def end() -> None:
            self._watchers.pop(watcher, None)

        return end

    def _readiness(self) -> bytes:
        return _encoded(_Response.SERVING if self._is_ready else _Response.NOT_SERVING)


def _name(request: bytes) -> str:
    try:
        name: str = health_pb2.HealthCheckRequest.FromString(request).service
    except DecodeError as error:
        raise ProtocolError(f"an undecodable health check: {error}") from error
    return name


def _encoded(status: int) -> bytes:
    encoded: bytes = _Response(status=status).SerializeToString()
    return encoded
