"""The reference endpoint picker (Gateway API Inference Extension, Go) as a process beside ours.

Its one rule: it runs as shipped, with its default scheduling profile, over pods that are objects of a real API server
whose addresses are the benchmark's backends. It must not be tuned, neither way.
"""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from control_plane import binaries, control_plane, die_with_parent

HERE = Path(__file__).resolve().parent

READY_TIMEOUT_S = 60.0
POOL = """
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: pool}
spec:
  selector: {matchLabels: {app: backend}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: epp, port: {number: 9002}}
"""


def build() -> Path:
    """The folder with `epp`, `vegeta` and the CRDs. Raises CalledProcessError without Go."""
    built = subprocess.run([HERE / "build"], check=True, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.strip().splitlines()[-1])


@contextmanager
def reference_picker(addresses: list[str], grpc_port: int, health_port: int, metrics_port: int) -> Iterator[int]:
    """Yields the process id of a picker that serves `addresses` (all on port 8000) on `grpc_port`, in plaintext."""
    folder = build()
    with control_plane() as kubeconfig:
        environment = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            "POD_NAME": "epp-6d4f79b5c8-abcde",
            "NAMESPACE": "default",
        }

        def kubectl(*arguments: str, stdin: str | None = None) -> None:
            subprocess.run(
                [binaries() / "kubectl", *arguments],
                check=True,
                env=environment,
                input=stdin,
                text=True,
                stdout=subprocess.DEVNULL,
            )

        kubectl("apply", "-f", str(folder / "crds"))
        kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        for number, address in enumerate(addresses):
            name = f"backend-{number}"
            kubectl(
                "apply", "-f", "-",
                stdin=f"{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, labels: {{app: backend}}}}, "
                "spec: {schedulerName: none, containers: [{name: c, image: x}]}}",
            )  # fmt: skip
            status = (
                f'{{"status":{{"phase":"Running","podIP":"{address}","podIPs":[{{"ip":"{address}"}}],'
                '"conditions":[{"type":"Ready","status":"True"}]}}'
            )
            kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", status)
        kubectl("apply", "-f", "-", stdin=POOL)
        process = subprocess.Popen(
            [
                folder / "epp", "--pool-name", "pool", "--pool-namespace", "default", "--secure-serving=false",
                "--tracing=false", "--metrics-endpoint-auth=false", "--zap-log-level", "error",
                "--grpc-port", str(grpc_port), "--grpc-health-port", str(health_port),
                "--metrics-port", str(metrics_port),
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            _await_metrics(metrics_port, process)
            yield process.pid
        finally:
            process.terminate()
            process.wait(10)


def _await_metrics(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the reference picker did not start") from None
            time.sleep(0.2)
