"""`NotRenderable`: why a request's prompt cannot be told from its text.

The one rule: this is an expected refusal, never a fault; whoever catches it routes the request by load alone and counts
the reason. `reason` is one short line without any of the request's text, so that it may go into a metric or a log.
"""

from trimtab_core.errors import CoreError


class NotRenderable(CoreError):  # noqa: N818 - a refusal, which its name says better
    """The engine would refuse this request, or builds its prompt in a way that the model card does not describe."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
