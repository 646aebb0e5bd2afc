"""The native front: one gRPC connection in Rust, worked off in turns. See `extproc/native`; used by `native_front`."""

from typing import Final, Literal, final

HALF_CLOSED: Final = 0
"""Event: the peer sends no more and waits for the status."""
ENDED: Final = 1
"""Event: the stream is gone, whoever ended it except ourselves."""
PAUSE: Final = 2
"""Answer: read no more of the stream."""
RESUME: Final = 3
"""Answer: read on."""

Event = tuple[int, bytes | tuple[str, float | None] | int]
"""Stream and: a message; path and timeout (seconds) of a stream that was opened; HALF_CLOSED or ENDED."""
Answer = tuple[int, bytes | tuple[int, str] | int]
"""Stream and: a message; the status that ends it; PAUSE or RESUME."""

Modes = tuple[int, int]
"""The body modes of request and response, by the protocol's numbers."""
Read = (
    tuple[Literal[0], dict[str, str], bool, Modes | None, bool]
    | tuple[Literal[1], bytes, bool, dict[str, str] | None, Modes | None, bool]
    | tuple[Literal[2], dict[str, str], bool, Modes | None]
    | tuple[Literal[3], bytes, bool]
)
"""The request's headers (headers, end of stream, modes, usual responses are not told), its body (body, end of stream,
what is told of the headers, modes, usual responses are not told), the response's headers (those of interest, end of
stream, modes), its body (body, end of stream)."""

def read_message(message: bytes) -> Read | None:
    """One message of a gateway; None: `wire` has to look at it."""

@final
class Tls:
    """The server's side of TLS, from PEM. Raises ValueError."""

    def __init__(self, certificate: bytes, key: bytes) -> None: ...

@final
class Connection:
    """One connection; takes the descriptor over. All calls, and its end, on one thread.

    Every call does all that can be done without the peer and returns what happened.
    """

    def __init__(
        self,
        descriptor: int,
        tls: Tls | None,
        *,
        message_bytes_max: int,
        gathered_bytes_max: int,
        streams_max: int,
    ) -> None: ...
    def readable(self) -> list[Event]:
        """The socket may have bytes."""

    def writable(self) -> list[Event]:
        """The socket may have room."""

    def answer(self, answers: list[Answer]) -> list[Event]:
        """Send, end, pause, resume; what is for a stream that has ended is dropped."""

    def shut_down(self) -> list[Event]:
        """Let the peer open no more streams; the connection closes after the last one."""

    def ping(self) -> list[Event]:
        """Ask the peer for a sign of life, unless that is still awaited."""

    @property
    def is_pong_awaited(self) -> bool: ...
    @property
    def is_blocked(self) -> bool:
        """Call `writable` once the socket has room."""

    @property
    def is_closed(self) -> bool:
        """Over: let go of it."""
