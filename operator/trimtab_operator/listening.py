"""Where the operator's processes listen for HTTP.

The one rule: a port that cannot be had ends the process, with the flag that gives another one.
"""

import errno
import ssl
from typing import Final

from aiohttp import web

from trimtab_operator.ending import EndingError

BIND_FLAG: Final = "--bind"
METRICS_FLAG: Final = "--metrics-port"
WEBHOOK_FLAG: Final = "--webhook-port"
PORT_FAULTS: Final = frozenset({errno.EADDRINUSE, errno.EACCES})
"""What is wrong with the port; all else is with the address."""


class ListenError(EndingError):
    """The text names the flag, the address and what the system says of it."""


async def listen(
    runner: web.AppRunner, bind: str | None, port: int, *, flag: str, tls: ssl.SSLContext | None = None
) -> int:
    """Returns the port. `bind` None: all addresses of both families, as far as there are any. Raises ListenError."""
    try:
        await web.TCPSite(runner, bind, port, ssl_context=tls).start()
    except OSError as error:
        wrong = flag if error.errno in PORT_FAULTS else BIND_FLAG
        raise ListenError(f"{wrong}: cannot listen: {error.strerror or error}; give another one") from error
    bound: int = runner.addresses[0][1]
    return bound
