"""Memory of the operator's process with many pods in the cluster: a real API server, a real store, the real command.

    python bench/operator_memory.py [--pods 5000] [--pools 10] [--json FILE]

Prints the resident memory before the pods are there, when all are members, and its peak. A figure is refused unless
the control documents in the store name every pod.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "e2e" / "cluster"), str(ROOT / "tests")]

import yaml
from control_plane import control_plane
from valkey_server import free_port, running

from trimtab.processes import Supervisor
from trimtab_operator.kube import CRDS, NAMESPACES, PODS, POLICIES, POOLS, Kube, KubeError, Object
from trimtab_state import PoolKeys, Store, connect
from trimtab_state.documents import decode_control

NAMESPACE = "many"
POD_BYTES = 8_000
"""Of a pod as JSON, which is what an engine's pod of a real cluster has."""
WRITERS = 16
SETTLE_S = 5.0


def resident_mib(pid: int) -> tuple[float, float]:
    """(now, peak)"""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return int(values["VmRSS"]) / 1024, int(values["VmHWM"]) / 1024


def pod(pool: int, number: int) -> Object:
    filler = [{"name": f"SETTING_{index}", "value": "x" * 80} for index in range(60)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"engine-{pool}-{number}", "namespace": NAMESPACE, "labels": {"app": f"engine-{pool}"}},
        "spec": {
            "nodeName": f"node-{number % 100}",
            "containers": [
                {
                    "name": "engine",
                    "image": "vllm/vllm-openai",
                    "args": ["--model", "some/model"],
                    "env": filler,
                    "ports": [{"containerPort": 8000}],
                    "resources": {"limits": {"nvidia.com/gpu": "8"}},
                }
            ],
        },
    }


def status(pool: int, number: int) -> Object:
    ip = f"10.{pool}.{number // 250}.{number % 250 + 1}"
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": [ready]}}


async def measure(kubeconfig: Path, pods: int, pools: int) -> dict[str, object]:
    kube = await Kube.connect(str(kubeconfig))
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        await kube.create(CRDS, yaml.safe_load(file.read_text()))
    await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    with running() as valkey, tempfile.TemporaryDirectory() as folder:
        async with Supervisor(log_dir=Path(folder) / "logs") as supervisor:
            flags = ["--operator-namespace", NAMESPACE, "--store", valkey.url, "--webhook-certificate", "none"]
            flags += ["--kubeconfig", str(kubeconfig), "--metrics-port", str(free_port()), "--bind", "127.0.0.1"]
            await supervisor.start("operator", [sys.executable, "-m", "trimtab_operator", "run", *flags])
            pid = supervisor.pid("operator")
            await asyncio.sleep(SETTLE_S)
            before, _ = resident_mib(pid)
            for number in range(pools):
                await declare(kube, number)
            await create_pods(kube, pods, pools)
            store = connect(valkey.url)
            async with asyncio.timeout(120):
                while (members := await members_of(store, pools)) < pods:  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
            await store.close()
            await asyncio.sleep(SETTLE_S)
            after, peak = resident_mib(pid)
            # And anew, with all of them there from the start.
            await supervisor.stop("operator")
            await supervisor.start("again", [sys.executable, "-m", "trimtab_operator", "run", *flags])
            await asyncio.sleep(4 * SETTLE_S)
            again, again_peak = resident_mib(supervisor.pid("again"))
    await kube.close()
    return {
        "row": "operator memory",
        "pods": members,
        "pools": pools,
        "pod_bytes": len(json.dumps(pod(0, 0))),
        "before_mib": round(before),
        "after_mib": round(after),
        "peak_mib": round(peak),
        "restarted_mib": round(again),
        "restarted_peak_mib": round(again_peak),
    }


async def declare(kube: Kube, number: int) -> None:
    spec: Object = {"selector": {"matchLabels": {"app": f"engine-{number}"}}, "targetPorts": [{"number": 8000}]}
    spec["endpointPickerRef"] = {"name": f"trimtab-pool-{number}", "port": {"number": 9002}}
    metadata = {"name": f"pool-{number}", "namespace": NAMESPACE}
    pool = {"apiVersion": POOLS.api_version, "kind": POOLS.kind, "metadata": metadata, "spec": spec}
    policy_spec = {"targetRef": {"name": metadata["name"]}, "standalone": {"enabled": False}}
    policy = {"apiVersion": POLICIES.api_version, "kind": POLICIES.kind, "metadata": metadata, "spec": policy_spec}
    for body in (policy, pool):
        for _ in range(50):
            try:
                await kube.apply(body, manager="bench")
                break
            except KubeError as error:
                if error.status != 404:
                    raise
                await asyncio.sleep(0.2)


async def create_pods(kube: Kube, pods: int, pools: int) -> None:
    numbers = iter(range(pods))
    done = 0

    async def write() -> None:
        nonlocal done
        for number in numbers:
            pool, index = number % pools, number // pools
            await kube.create(PODS, pod(pool, index))
            await kube.merge(PODS, NAMESPACE, f"engine-{pool}-{index}", status(pool, index), subresource="status")
            done += 1
            if done % 500 == 0:
                print(f"{done} of {pods} pods", file=sys.stderr, flush=True)

    await asyncio.gather(*(write() for _ in range(WRITERS)))


async def members_of(store: Store, pools: int) -> int:
    total = 0
    for number in range(pools):
        data = await store.execute("GET", PoolKeys(NAMESPACE, f"pool-{number}").control)
        total += 0 if data is None else len(decode_control(data).endpoints)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=5_000)
    parser.add_argument("--pools", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    os.environ.pop("TRIMTAB_STORE", None)
    with control_plane() as kubeconfig:
        row = asyncio.run(measure(kubeconfig, options.pods, options.pools))
    print(json.dumps(row))
    if options.json is not None:
        options.json.write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
