"""What can go wrong in the core, grouped by what the caller does about it.

Expected refusals are no errors: `Scheduler.place` answers with a `Rejection`.
"""


class CoreError(Exception):
    """The root of everything the core raises on purpose."""


class DataError(CoreError, ValueError):
    """Bytes from outside cannot be read: drop them, and ask for them again or start afresh."""


class UnknownSlot(CoreError, LookupError):  # noqa: N818  # says what is wrong already
    """A slot that was never added, or is removed: the caller's map of endpoints is wrong."""


class CoreUnavailable(CoreError, ImportError):  # noqa: N818  # says what is wrong already
    """The core that was asked for cannot be had: install it, or ask for another one."""


class InvariantError(CoreError, AssertionError):
    """The state contradicts itself: a bug. Raised only by `check_invariants()`."""


def ensure(condition: bool, message: str) -> None:
    """Raise `InvariantError(message)` unless `condition` holds; unlike `assert` it also runs under `python -O`."""
    if not condition:
        raise InvariantError(message)
