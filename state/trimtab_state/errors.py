"""What can go wrong in the shared state, grouped by what the caller does about it.

The one rule: nothing from the Redis client leaves this package; callers see these and no others.
"""


class StateError(Exception):
    """Root of every error that this package raises."""


class ConfigError(StateError):
    """The store's URL or a setting is wrong: say so and stop, trying again does not help."""


class StateUnavailable(StateError):  # noqa: N818 (a condition, not a fault of the caller)
    """The store cannot be reached, refuses the login, or refuses to serve: keep what is known and try again later."""


class CodecError(StateError):
    """A value from the store is malformed or of an unknown version: count it and skip it."""
