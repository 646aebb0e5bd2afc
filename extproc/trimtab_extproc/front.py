"""The gRPC server that gateways talk to: its seam, and which of the two there are is used.

The one rule: both do the same, so nobody but the composition root, the log and a metric cares which one it is. `native`
(Rust, in the event loop's own thread) where it is built; `grpcio` (the library's asyncio server), which says what is
right, everywhere else. A setting asks for one.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimtab_extproc import wire
from trimtab_extproc.certificate import Certificate
from trimtab_extproc.errors import ConfigError
from trimtab_extproc.events import GatewayEvent
from trimtab_extproc.health import Health
from trimtab_extproc.processor import ExternalProcessor

NATIVE, GRPCIO, AUTO = "native", "grpcio", "auto"
FRAMING_BYTES = 1 << 20
"""Room for headers and framing beside the largest body in one message."""
KEEPALIVE_S = 30.0
KEEPALIVE_TIMEOUT_S = 10.0
"""A gateway that does not answer a ping for this long is gone, and its exchanges end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """The server's bounds."""

    body_bytes_max: int = 64 << 20
    """The largest request body."""
    gathered_bytes_max: int = 512 << 20
    """Bytes of messages that are not complete yet, of one connection; the stream that passes it is refused."""
    exchanges_max: int = 16_384
    """Exchanges in flight at once; more end with RESOURCE_EXHAUSTED, so that the gateway's failureMode decides."""

    @property
    def message_bytes_max(self) -> int:
        """The largest message."""
        return self.body_bytes_max + FRAMING_BYTES


class Front(Protocol):
    """A server of health checks and, if it was given a processor, of ext_proc."""

    async def start(self, host: str, port: int, certificate: Certificate | None) -> int:
        """Listen; returns the port, a free one for 0. Without a certificate in plaintext. Raises OSError."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Take no new streams; those in flight may finish for so long, then they are cut. Idempotent."""
        ...


def choose(wanted: str) -> tuple[str, str]:
    """The name of the front to use, and why. Raises ConfigError where it cannot be had."""
    if wanted == GRPCIO:
        return GRPCIO, "asked for"
    try:
        importlib.import_module("trimtab_extproc._front")
    except ImportError as error:
        why = f"the native front is not there ({error}); {_advice()}"
        if wanted == NATIVE:
            raise ConfigError(f"--front (or TRIMTAB_FRONT) {wanted}: {why}") from error
        return GRPCIO, why
    return NATIVE, "it is built" if wanted == AUTO else "asked for"


def new_front(
    name: str, *, settings: FrontSettings, health: Health, processor: ExternalProcessor | None = None
) -> Front:
    """A server by its name. Only what is used is imported."""
    if name == NATIVE:
        from trimtab_extproc.native_front import NativeFront

        return NativeFront(settings=settings, health=health, processor=processor)
    from trimtab_extproc.grpcio_front import GrpcioFront

    return GrpcioFront(settings=settings, health=health, processor=processor)


def decoder(name: str) -> Callable[[bytes], GatewayEvent]:
    """What reads the gateway's messages beside the server of that name."""
    if name == NATIVE:
        from trimtab_extproc import native_wire

        return native_wire.decode
    return wire.decode


def _advice() -> str:
    """What to do about it. Where cargo was there and failed, setup.py left word."""
    failed = Path(__file__).with_name("_front_failed.txt")
    if failed.exists():
        return f"its build failed: {failed.read_text()}"
    return "install cargo, then `make clean demo` or `pip install .` builds it"


if __name__ == "__main__":
    print("front: {} ({})".format(*choose(AUTO)))
