"""`python -m trimtab_sidecar [drain] --flags`: run the sidecar, or tell it that its pod is going."""

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Sequence

import uvloop

from trimtab_sidecar.drain import drain
from trimtab_sidecar.json_log import log_json
from trimtab_sidecar.pool_access import AccessError
from trimtab_sidecar.settings import SettingsError, hold_s, parse_settings
from trimtab_sidecar.sidecar import Sidecar
from trimtab_state.errors import ConfigError

logger = logging.getLogger(__name__)

GC_THRESHOLDS = (10_000, 50, 1_000)
"""Nearly no walks over old objects: the map of blocks has no cycles, and each walk over it holds the event loop."""
EXIT_SETTINGS = 2
EXIT_ERROR = 70
EXIT_NOT_TOLD = 1


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_drain = words[:1] == ["drain"]
    try:
        settings = parse_settings(words[1:] if is_drain else words, os.environ)
        log_json(settings.log_level)
        if is_drain:
            return 0 if asyncio.run(drain(settings)) else EXIT_NOT_TOLD
        gc.set_threshold(*GC_THRESHOLDS)
        uvloop.run(Sidecar(settings).run())
        return 0
    except (SettingsError, AccessError, ConfigError) as error:
        print(f"trimtab-sidecar: {error}", file=sys.stderr, flush=True)
        if not is_drain:
            time.sleep(hold_s(os.environ))
        return EXIT_SETTINGS
    except Exception:
        # Whatever it was, the kubelet starts the sidecar again, and the log says why in the form of all others.
        logger.exception("ended by an error")
        return EXIT_ERROR


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    # Taking a large map apart object by object can take longer than the second that the kubelet should wait.
    os._exit(code)
