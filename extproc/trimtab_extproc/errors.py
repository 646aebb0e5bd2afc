"""The errors of this package, grouped by what the caller does about them. Expected refusals are values, not errors."""


class ExtprocError(Exception):
    """Anything this package raises on purpose."""


class ProtocolError(ExtprocError):
    """The gateway sent what the protocol does not allow here: end its stream, so that its failureMode decides."""


class NotReady(ExtprocError):  # noqa: N818 - a condition that passes, not a fault
    """We cannot choose yet: end the stream at the request's headers, so that the gateway's failureMode decides."""


class ConfigError(ExtprocError):
    """The process was started with settings that cannot work: say which, and exit."""
