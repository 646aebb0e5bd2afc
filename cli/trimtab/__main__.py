"""`trimtab`: one command for people. Parses flags, calls one of the verbs, and turns errors into one clear line.

Its one rule: this is the only place that reads the command line, prints errors and sets the exit status. It must not do
the work itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from trimtab.engine_choice import EngineChoice
from trimtab.errors import UsageError
from trimtab.flag_values import rate, whole_number
from trimtab.processes import ProcessError
from trimtab_core.errors import CoreUnavailable

ENDPOINTS_MAX: Final = 64
PICKER_URL: Final = "http://127.0.0.1:9090"
"""Where `explain` and `top` look by default."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells have it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command's entry point. Exit status: 0 done, 1 a part failed, 2 wrong usage, 130 interrupted.

    Interrupting is how `local` and `top --watch` are done.
    """
    try:
        options, unknown = _parser().parse_known_args(arguments)
        if unknown:
            # Not left to argparse, which would send the reader to the help of the whole command.
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        options.run(options)
    except (UsageError, CoreUnavailable) as error:
        sys.exit(_complain(str(error), status=2))
    except ProcessError as error:
        sys.exit(_complain(str(error), status=1))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader (`head`, say) has seen enough.
        sys.stderr.close()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="trimtab",
        description="LLM inference scheduler: every request to the endpoint with the least P-token x BS.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB", parser_class=_Parser)

    demo = verbs.add_parser("demo", help="replay real conversations with round robin and with Trimtab, and compare")
    _add_stack_flags(demo)
    demo.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a trace in Mooncake's format, .jsonl or .jsonl.gz (default: shipped)",
    )
    demo.add_argument(
        "--rate", type=rate, default=None, metavar="X", help="requests per second (default: fits the engines)"
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    demo.add_argument(
        "--plot", type=Path, default=Path("trimtab-demo.png"), metavar="FILE", help="the plot (default: %(default)s)"
    )
    demo.set_defaults(run=_demo, parser=demo)

    local = verbs.add_parser("local", help="run the whole stack on this machine until Ctrl-C")
    _add_stack_flags(local)
    local.set_defaults(run=_local, parser=local)

    explain = verbs.add_parser("explain", help="why the last requests went where they went")
    explain.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="a picker's metrics port; repeat for several (default: http://127.0.0.1:9090)",
    )
    explain.add_argument(
        "--last", type=whole_number(1), default=5, metavar="N", help="decisions to show, the newest last (default: 5)"
    )
    explain.add_argument("--json", action="store_true", help="everything, for programs, in the same order")
    explain.set_defaults(run=_explain, parser=explain)

    top = verbs.add_parser("top", help="what pickers believe of their endpoints now")
    top.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="a picker's metrics port; repeat for several, to see whether they agree (default: http://127.0.0.1:9090)",
    )
    top.add_argument(
        "--watch",
        type=whole_number(1, 3600),
        nargs="?",
        const=2,
        default=None,
        metavar="SECONDS",
        help="again and again until Ctrl-C, with rates in place of totals (default: every 2)",
    )
    top.set_defaults(run=_top, parser=top)
    return parser


def _add_stack_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoints",
        type=whole_number(1, ENDPOINTS_MAX),
        default=None,
        metavar="N",
        help="engines (default: 4; with real ones 2)",
    )
    parser.add_argument(
        "--engine", choices=("emulated", "vllm"), default="emulated", help="vllm: real servers on the CPU"
    )
    parser.add_argument(
        "--vllm", type=Path, metavar="PATH", help="the vllm command for --engine vllm (default: the one on the PATH)"
    )
    parser.add_argument(
        "--max-model-len",
        type=whole_number(1024, 8192),
        default=4096,
        metavar="N",
        help="context of real engines (default: 4096)",
    )


def _demo(options: argparse.Namespace) -> None:
    from trimtab.demo import DemoOptions, demo

    _run(
        demo(
            DemoOptions(
                choice=_choice(options),
                trace=options.trace,
                rate=options.rate,
                json_path=options.json,
                plot_path=options.plot,
            ),
            say=_say,
        )
    )


def _local(options: argparse.Namespace) -> None:
    from trimtab.local import local

    with contextlib.suppress(asyncio.CancelledError):
        _run(local(_choice(options), say=_say))


def _explain(options: argparse.Namespace) -> None:
    from trimtab.explain import ExplainOptions, explain

    urls = tuple(options.url or (PICKER_URL,))
    print(explain(ExplainOptions(urls=urls, last=options.last, as_json=options.json)))


def _top(options: argparse.Namespace) -> None:
    from trimtab.top import CLEAR, top, watch

    urls = tuple(options.url or (PICKER_URL,))
    if options.watch is None:
        print(asyncio.run(top(urls)))
        return
    start = CLEAR if sys.stdout.isatty() else "\n"
    with contextlib.suppress(asyncio.CancelledError):
        _run(watch(urls, every_s=options.watch, show=lambda text: _say(start + text)))


def _choice(options: argparse.Namespace) -> EngineChoice:
    return EngineChoice(
        engine=options.engine,
        vllm=options.vllm,
        endpoints=options.endpoints,
        context_tokens=options.max_model_len,
    )


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or until a signal cancels it so that everything it started can be stopped first."""

    async def interruptible() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        await work

    with contextlib.closing(work):
        asyncio.run(interruptible())


def _say(text: str) -> None:
    print(text, flush=True)


def _complain(message: str, *, status: int) -> int:
    print(f"trimtab: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
