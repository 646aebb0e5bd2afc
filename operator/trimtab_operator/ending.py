"""Why a process ends by itself: what a new one in its place may find to be over.

The one rule: the text says all; whoever raises one has nothing more to add by where it came from.
"""


class EndingError(Exception):
    """End the process with 1."""
