"""`make pictures`: a live pool for some minutes, and a picture of each dashboard as it would show them.

    python -m trimtab_observability.pictures [FOLDER] [--seconds N]

The one rule: it shows what happened. The pool is placed by the product, for a while in round robin, and by the product
again; meanwhile a few requests too many come at once, and one application becomes popular.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any, Final

from trimtab.commands import POOL_NAME, POOL_NAMESPACE
from trimtab.stack import StackSettings
from trimtab_observability.asking import answers
from trimtab_observability.chatter import Chatter
from trimtab_observability.drawing import draw
from trimtab_observability.generate import FOLDER
from trimtab_observability.live_pool import ROOT, LivePool, api_server, live_pool
from trimtab_observability.local_prometheus import binary

COMMAND: Final = "make pictures"
CAPTION: Final = f"drawn from the dashboard's own queries by `{COMMAND}`; not a screenshot of Grafana"
STACK: Final = StackSettings(endpoints=4, pickers=2)
TALKERS: Final = 16
BATCH_LIMIT: Final = 6
BURST: Final = 48
WARM_UP_S: Final = 15.0
IN_FORCE_S: Final = 30.0
"""How long a change of the policy may take to reach the pickers, and Prometheus."""


async def main(folder: Path, *, seconds: float) -> None:
    """Run it and draw."""
    prometheus = binary()
    if prometheus is None:
        raise SystemExit("make pictures needs the `prometheus` command (Debian: apt-get install prometheus)")
    with api_server() as kube_config:
        async with live_pool(STACK, prometheus=prometheus, kube_config=kube_config) as pool:
            start_s = await _happen(pool, seconds)
            end_s = time.time()
            for file in sorted((ROOT / FOLDER).glob("*.json")):
                dashboard: dict[str, Any] = json.loads(file.read_text())
                found = await answers(
                    pool.prometheus, dashboard, namespace=POOL_NAMESPACE, pool=POOL_NAME, start_s=start_s, end_s=end_s
                )
                draw(dashboard, found, folder / f"{file.stem}.png", caption=CAPTION)
                print(folder / f"{file.stem}.png")


async def _happen(pool: LivePool, seconds: float) -> float:
    """What the pictures show; returns when it began."""
    chatter = Chatter(session=pool.session, url=pool.stack.url, seed=7, talkers=TALKERS)
    async with chatter.going_on():
        await asyncio.sleep(WARM_UP_S)
        start_s = time.time()
        await asyncio.sleep(seconds * 0.3)
        await pool.set_policy(mode="RoundRobin")
        await _is_in_force(pool, "round_robin")
        await asyncio.sleep(seconds * 0.3)
        await pool.set_policy(batchLimit=BATCH_LIMIT)
        await _is_in_force(pool, "product")
        await chatter.burst(BURST)
        await pool.set_policy()
        await asyncio.sleep(seconds * 0.1)
        popular = Chatter(session=pool.session, url=pool.stack.url, seed=8, talkers=2 * TALKERS, applications=1)
        async with popular.going_on():
            await asyncio.sleep(seconds * 0.3)
    return start_s


async def _is_in_force(pool: LivePool, policy: str) -> None:
    """Wait until every picker chooses so. Raises TimeoutError."""
    async with asyncio.timeout(IN_FORCE_S):
        while await pool.prometheus.now(f'trimtab_policy{{policy="{policy}"}} == 0'):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the dashboards from a live pool.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "dashboards")
    parser.add_argument("--seconds", type=float, default=150.0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(options.folder, seconds=options.seconds))
