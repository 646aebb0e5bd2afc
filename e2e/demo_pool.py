"""The demo's pool in the cluster, as its objects and its pickers tell of it."""

import json
import os
from pathlib import Path
from typing import Any

from kubectl import Object, get, items, kubectl, until

NAMESPACE = "trimtab-demo"
POLICY = "schedulingpolicy/demo"
PICKERS = "trimtab-demo"
ENVOY = "trimtab-demo-envoy"
ENGINES = "emulated-engine"
FRONT = f"http://{ENVOY}.{NAMESPACE}.svc.cluster.local/v1"
MANIFESTS = Path(__file__).parents[1] / "manifests"
IMAGE = "trimtab:0.1.0"


def manifest(name: str) -> str:
    """As it is in `manifests/`, unless E2E_IMAGE names another image: clusters that pull need one that they can."""
    text = (MANIFESTS / name).read_text()
    image = os.environ.get("E2E_IMAGE")
    return text.replace(f"image: {IMAGE}", f"image: {image}") if image else text


def status() -> Object:
    """Of its policy."""
    found: Object = get("-n", NAMESPACE, POLICY).get("status", {})
    return found


def is_settled(endpoints: int, pickers: int) -> bool:
    """All are there, and what each endpoint holds is known exactly."""
    seen = status()
    told = {
        "endpoints": seen.get("endpoints"),
        "exact": seen.get("modelCards", {}).get("exact"),
        "pickers": seen.get("pickers", {}).get("ready"),
    }
    wanted = {"endpoints": {"ready": endpoints, "total": endpoints}, "exact": endpoints, "pickers": pickers}
    assert told == wanted, f"{told}, not {wanted}"
    return True


def settled(*, endpoints: int, pickers: int = 2, timeout_s: float = 240.0) -> None:
    until(
        f"{endpoints} endpoints known exactly, {pickers} pickers",
        lambda: is_settled(endpoints, pickers),
        timeout_s=timeout_s,
    )


def running(component: str) -> list[Object]:
    """Pods of the pool's own parts that are not on their way out."""
    pods = items("-n", NAMESPACE, "pods", "-l", f"app.kubernetes.io/component={component}")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def decisions(last: int = 256) -> list[Any]:
    """Of all pickers, as `trimtab explain` shows them."""
    pods = running("picker")
    urls = [word for pod in pods for word in ("--url", f"http://{pod['status']['podIP']}:9090")]
    words = ["trimtab", "explain", "--json", "--last", str(last), *urls]
    found: list[Any] = json.loads(kubectl("-n", NAMESPACE, "exec", pods[0]["metadata"]["name"], "--", *words))
    return [one for one in found if not one.get("refused")]


def restarts(component: str) -> int:
    """Of all containers: a kubelet that kills what it should not is seen here."""
    pods = running(component)
    return sum(
        one["restartCount"]
        for pod in pods
        for kind in ("containerStatuses", "initContainerStatuses")
        for one in pod["status"].get(kind, [])
    )
