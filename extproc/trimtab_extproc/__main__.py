"""`python -m trimtab_extproc`: the composition root of one endpoint picker."""

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys

import uvloop

from trimtab_extproc.errors import ConfigError
from trimtab_extproc.service import Service
from trimtab_extproc.settings import Settings, parse_settings
from trimtab_state import ConfigError as StateConfigError
from trimtab_state.json_logs import log_to_stderr

EXIT_SETTINGS = 2
"""Exit status where a setting cannot work, as the other commands have it."""
GC_OBJECTS = 20_000
"""New objects between two looks for cycles."""
SWITCH_INTERVAL_S = 0.001
"""How long a thread that renders a big prompt may keep the event loop waiting, at most."""


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    rng_seed = secrets.randbits(64)
    logging.getLogger(__name__).info("pool %s/%s, seed %d", settings.pool_namespace, settings.pool_name, rng_seed)
    service = Service(settings, rng_seed=rng_seed)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    # What start-up made lives as long as the process: collections need not look at it again.
    gc.collect()
    gc.freeze()
    # A request leaves no cycles behind, so looking for them after each seven hundred objects finds nothing.
    gc.set_threshold(GC_OBJECTS, *gc.get_threshold()[1:])
    await service.run()


def main() -> None:
    """The command's entry point."""
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
        log_to_stderr(settings.log_level)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (ConfigError, StateConfigError) as error:
        print(f"trimtab-extproc: {error}", file=sys.stderr)
        sys.exit(EXIT_SETTINGS)


if __name__ == "__main__":
    main()
