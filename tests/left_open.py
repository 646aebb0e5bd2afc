"""What a test leaves open is told to that test, or at least to its module (a pytest plugin).

The one rule: a connection whose event loop is gone is found by the garbage collector some time later, and a test that
has nothing to do with it is blamed. So it is looked for when the loop closes. A connection that was closed gets the
turns of the loop that its end takes, which is a matter of the machine and of the other side; one that nobody has closed
is a fault, and is cut. For all else the garbage is collected at the end of each module.

It must not know what connections are for. It sees every selector loop of this process, whoever runs it.
"""

import asyncio
import gc
import warnings
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from typing import Any

import pytest

END_S = 30.0
"""Longest wait for what was closed: TLS says goodbye, and the other side answers. asyncio waits no longer either."""
POLL_S = 0.002

_close = BaseSelectorEventLoop.close
_found: list[str] = []
"""Of loops that were closed since it was last asked. Loops may be closed on any thread."""


def pytest_configure() -> None:
    BaseSelectorEventLoop.close = _close_loop  # type: ignore[assignment,method-assign]


def pytest_unconfigure() -> None:
    BaseSelectorEventLoop.close = _close  # type: ignore[method-assign]


def pytest_collection_finish() -> None:
    """Modules are not looked through again and again: that would be most of what it costs."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Once a test has failed nobody is blamed any more: where it stopped, nothing was closed."""
    result = yield
    connections = _found.copy()
    del _found[: len(connections)]
    garbage = _garbage(item) if nextitem is None or nextitem.path != item.path else []
    if item.session.testsfailed == 0:
        if connections:
            said = "a loop was closed with connections in it that nobody had closed:"
            pytest.fail("\n".join([said, *connections]), pytrace=False)
        if garbage:
            said = f"some test of {item.path.name} has left this to the garbage collector:"
            pytest.fail("\n".join([said, *garbage]), pytrace=False)
    return result


def _close_loop(loop: BaseSelectorEventLoop) -> None:
    # Inside a running one, as where the garbage collector closes a loop, no other can be run.
    if not loop.is_closed() and asyncio._get_running_loop() is None:
        _found.extend(_cut(loop))
    _close(loop)


def _cut(loop: BaseSelectorEventLoop) -> list[str]:
    """Cuts the connections that nobody has closed, or that do not end, and names them."""
    if not _remaining(loop):
        return []
    # Those whose owner is forgotten are closed with it, and say so while it is known whose they are.
    gc.collect()
    connections = _remaining(loop)
    found = [f"{connection.get_extra_info('socket')} of {connection.get_protocol()}" for connection in connections]
    for connection in connections:
        connection.abort()
    loop.run_until_complete(asyncio.sleep(0))
    return found


def _remaining(loop: Any) -> list[Any]:
    """What is open when all that was closed has ended."""
    until_s = loop.time() + END_S
    while True:
        connections = [transport for transport in list(loop._transports.values()) if _is_open(transport)]
        if not any(map(_is_ending, connections)) or loop.time() > until_s:
            return connections
        loop.run_until_complete(asyncio.sleep(POLL_S))


def _is_open(transport: Any) -> bool:
    return bool(transport.get_extra_info("socket").fileno() >= 0)


def _is_ending(transport: Any) -> bool:
    """Whether it was closed, by itself or as the TLS connection that it carries."""
    carried = getattr(transport.get_protocol(), "_app_transport", None)
    return transport.is_closing() or (carried is not None and carried.is_closing())


def _garbage(item: pytest.Item) -> list[str]:
    """Warnings of what nobody refers to any more, when it is collected."""
    # The fixtures of the test are over, but it refers to them until it is over itself.
    getattr(item, "funcargs", {}).clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.collect()
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]
