"""`python -m trimtab_operator [run|webhook]`: the composition root of the operator's processes.

The one rule: each command imports its own parts when it runs; a webhook has no use for a third of the memory.
"""

import asyncio
import logging
import os
import random
import secrets
import signal
import sys

from trimtab_operator.ending import EndingError
from trimtab_operator.kube import Kube, KubeError
from trimtab_operator.settings import Settings, SettingsError, install_of, parse_settings
from trimtab_state.json_logs import log_to_stderr

EXIT_SETTINGS = 2
EXIT_FAILED = 1
FORESEEN = (EndingError, KubeError, OSError)
"""What a new process may find to be over; its text says all."""

log = logging.getLogger("trimtab_operator")


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    from trimtab_operator.service import Service

    service = Service(settings, rng=random.Random(secrets.randbits(64)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    await service.run()


async def serve_webhook(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    from trimtab_operator.injection import server as webhook
    from trimtab_operator.injection.server import WebhookSettings

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    kube = await Kube.connect(settings.kubeconfig)
    try:
        await webhook.run(
            WebhookSettings(
                # A webhook derives nothing: it names the Secret that the operator keeps in each pool's namespace.
                install=install_of(settings, secret=b""),
                bind=settings.bind,
                port=settings.webhook_port,
                health_port=settings.metrics_port,
                certificate_secret=settings.certificate_secret,
                namespaces=settings.namespaces,
            ),
            kube,
            stop,
        )
    finally:
        await kube.close()


def main() -> None:
    """The command's entry point."""
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
    except SettingsError as error:
        print(f"trimtab-operator: {error}", file=sys.stderr)
        sys.exit(EXIT_SETTINGS)
    log_to_stderr(settings.log_level)
    if settings.log_level != "debug":
        # It tells each event.
        logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(settings) if settings.command == "run" else serve_webhook(settings))
    except Exception as failed:
        errors = _leaves(failed)
        is_bug = not all(isinstance(error, FORESEEN) for error in errors)
        text = "; ".join(str(error) or type(error).__name__ for error in errors)
        log.error("ending: %s", text, exc_info=failed if is_bug else None)
        # Not by returning: a thread that kopf has lost its way in must not hold the process.
        logging.shutdown()
        os._exit(EXIT_FAILED)


def _leaves(failed: BaseException) -> list[BaseException]:
    if isinstance(failed, BaseExceptionGroup):
        return [leaf for error in failed.exceptions for leaf in _leaves(error)]
    return [failed]


if __name__ == "__main__":
    main()
