"""`python -m trimtab_operator.install_check`: whether an installation works, from inside the cluster (`helm test`).

The one rule: it only looks, with rights that everybody has, and each line it prints says what was looked at and what to
do about it. It waits for what is still starting, and not for what is wrong.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp

from trimtab_operator.kube import POLICIES, POOLS, Kube, KubeError, Resource
from trimtab_operator.store.eviction import SAFE, evicting_policy
from trimtab_state import ConfigError, StateUnavailable, connect

PAUSE_S: Final = 2.0
REQUEST_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one look came to. `is_final`: waiting would not change it."""

    fault: str = ""
    """Empty: all is well."""
    note: str = ""
    is_final: bool = False


Look = Callable[[], Awaitable[Finding]]


async def store_answers(url: str) -> Finding:
    """It lets us in, and keeps what it is told."""
    try:
        store = connect(url)
    except (ConfigError, OSError) as error:
        return Finding(fault=f"{error}. Put the URL right (store.* of the chart's values)", is_final=True)
    try:
        await store.execute("PING")
        if policy := await evicting_policy(store):
            return Finding(
                fault=f"{store.address} has maxmemory-policy {policy}, and throws away what pickers need when it is"
                f" full: set it to {SAFE}",
                is_final=True,
            )
        return Finding(note=str(store.address))
    except (StateUnavailable, OSError) as error:
        return Finding(
            fault=f"{store.address}: {error}. Is it up, is the password right, does a NetworkPolicy forbid it?"
        )
    finally:
        await store.close()


async def answers_ready(url: str) -> Finding:
    """`/readyz` says yes."""
    limits = aiohttp.ClientTimeout(total=REQUEST_S)
    try:
        async with aiohttp.ClientSession(timeout=limits) as session, session.get(f"{url}/readyz") as response:
            text = (await response.text()).strip()
            if response.status == 200:
                return Finding(note=url)
            return Finding(fault=f"{url} is not ready: {text}. Its log says more: kubectl logs")
    except (aiohttp.ClientError, TimeoutError) as error:
        words = str(error) or type(error).__name__
        return Finding(fault=f"{url} cannot be reached: {words}. See kubectl get pods, and their logs")


async def is_served(kube: Kube, resource: Resource) -> Finding:
    """The API server knows the kind. Everybody may ask for that."""
    try:
        served = await kube.kinds(resource.api_version)
    except KubeError as error:
        return Finding(fault=f"the API server does not say which kinds it has: {error}")
    if resource.kind in served:
        return Finding(note=resource.api_version)
    return Finding(
        fault=f"the API server has no kind {resource.kind} ({resource.api_version}):"
        " kubectl apply --server-side -f crds/"
    )


async def check(looks: Mapping[str, Look], *, timeout_s: float) -> bool:
    """Look at all of them until they are well, or final, or time is up; print a line for each. False: not all well."""
    results = await asyncio.gather(*(_until_well(name, look, timeout_s) for name, look in looks.items()))
    return all(results)


async def _until_well(name: str, look: Look, timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while True:
        finding = await look()
        if not finding.fault:
            print(f"ok      {name}: {finding.note}", flush=True)
            return True
        if finding.is_final or loop.time() + PAUSE_S > end_s:
            print(f"FAILED  {name}: {finding.fault}", flush=True)
            return False
        await asyncio.sleep(PAUSE_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trimtab_operator.install_check", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--store", default="", metavar="URL", help="the shared state's URL [TRIMTAB_STORE]")
    add("--operator-url", metavar="URL", help="where the operator serves /readyz")
    add("--webhook-url", metavar="URL", help="where the webhook serves /readyz")
    add("--kubeconfig", metavar="FILE", help="how to reach the API server, outside a cluster [KUBECONFIG]")
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long what starts is waited for (default: 60)",
    )
    return parser


async def _main(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    url = options.store or environment.get("TRIMTAB_STORE", "")
    try:
        kube = await Kube.connect(options.kubeconfig)
    except KubeError as error:
        print(f"FAILED  API server: {error}", flush=True)
        return False
    looks: dict[str, Look] = {
        "store": lambda: store_answers(url),
        POOLS.kind: lambda: is_served(kube, POOLS),
        POLICIES.kind: lambda: is_served(kube, POLICIES),
    }
    if options.operator_url:
        looks["operator"] = lambda: answers_ready(options.operator_url)
    if options.webhook_url:
        looks["webhook"] = lambda: answers_ready(options.webhook_url)
    try:
        return await check(looks, timeout_s=options.timeout)
    finally:
        await kube.close()


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(_main(_parser().parse_args(), os.environ)) else 1)
