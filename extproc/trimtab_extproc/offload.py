"""Work on big prompts, off the event loop.

The one rule: work of more than `INLINE_BYTES_MAX` never runs on the event loop, and never waits without bounds: beyond
`JOBS_MAX` jobs or `TIMEOUT_S` it is given up, and the request is routed by load. A job is a pure function of its
arguments, since it runs on another thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_BYTES_MAX = 32 * 1024
"""Bodies up to this size are parsed, rendered and hashed at once: handing them to a thread would cost more."""
THREADS = 2
JOBS_MAX = 64
"""Jobs that run or wait."""
PROMPT_BYTES = 1_024
"""What preparing one prompt costs beside its text, as bytes of text: a thousand empty ones are no small work."""
TIMEOUT_S = 0.5
"""A job that takes longer, waiting included, is given up (a gateway waits about a second for an answer); its thread
ends by the limits of rendering."""

T = TypeVar("T")


class OffloadOverflow(Exception):  # noqa: N818 - a refusal
    """Too many jobs, or too slow a one: do without its result."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Offload:
    """A bounded pool of threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="prompt")
        self.job_count = 0
        """Jobs that run or wait."""

    async def run(self, size_bytes: int, job: Callable[[], T]) -> T:
        """The job's result, computed here if it is small. Raises OffloadOverflow, and whatever the job raises."""
        if size_bytes <= INLINE_BYTES_MAX:
            return job()
        if self.job_count >= JOBS_MAX:
            raise OffloadOverflow("prompt_queue_full")
        future = self._threads.submit(job)
        self.job_count += 1
        future.add_done_callback(self._on_done(asyncio.get_running_loop()))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise OffloadOverflow("prompt_too_slow") from None

    def _on_done(self, loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
        def count_down() -> None:
            self.job_count -= 1

        def done(_: object) -> None:
            # From the thread, which may outlive the request and even the loop.
            if not loop.is_closed():
                loop.call_soon_threadsafe(count_down)

        return done

    def close(self) -> None:
        """Take no more jobs; do not wait for those that run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
