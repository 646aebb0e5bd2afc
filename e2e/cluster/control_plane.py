"""A real kube-apiserver on loopback, with its etcd: what an operator or a picker of the API needs, without any node.

    python e2e/cluster/control_plane.py COMMAND...        runs COMMAND with KUBECONFIG set, then stops everything

The binaries come from KUBEBUILDER_ASSETS, from PATH, or from `build` beside this file, in that order. Pods are API
objects only: nothing runs them, and tests write their status. Nothing is left behind: processes die with this one.
"""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
READY_TIMEOUT_S = 90.0
PORTS = range(20_000, 32_000)
PR_SET_PDEATHSIG = 1


def binaries() -> Path:
    """The folder that holds etcd, kube-apiserver and kubectl; builds them where they are not at hand."""
    for candidate in (os.environ.get("KUBEBUILDER_ASSETS"), os.path.dirname(shutil.which("kube-apiserver") or "")):
        if candidate and all((Path(candidate) / name).exists() for name in ("etcd", "kube-apiserver", "kubectl")):
            return Path(candidate)
    built = subprocess.run([HERE / "build"], check=True, stdout=subprocess.PIPE, text=True)
    return Path(built.stdout.strip().splitlines()[-1])


def free_ports(count: int) -> list[int]:
    """Below the range that outgoing connections take theirs from, so that none of them comes in between."""
    found: list[int] = []
    while len(found) < count:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found


def write_key(path: Path) -> None:
    """An RSA key, for service account tokens."""
    try:
        from cryptography.hazmat.primitives.asymmetric import rsa
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError:
        subprocess.run(["openssl", "genrsa", "-out", path, "2048"], check=True, capture_output=True)
        return
    key = rsa.generate_private_key(65537, 2048)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def control_plane() -> Iterator[Path]:
    """Yields the path of an administrator's kubeconfig; the server behind it is ready."""
    folder = binaries()
    state = Path(tempfile.mkdtemp(prefix="trimtab-control-plane-"))
    etcd_port, peer_port, api_port = free_ports(3)
    token = secrets.token_hex(16)
    (state / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    write_key(state / "sa.key")
    commands = {
        "etcd": [
            folder / "etcd", "--data-dir", state / "etcd", "--unsafe-no-fsync", "--log-level", "warn",
            "--listen-client-urls", f"http://127.0.0.1:{etcd_port}",
            "--advertise-client-urls", f"http://127.0.0.1:{etcd_port}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer_port}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer_port}",
            "--initial-cluster", f"default=http://127.0.0.1:{peer_port}",
        ],
        "kube-apiserver": [
            folder / "kube-apiserver", "--etcd-servers", f"http://127.0.0.1:{etcd_port}",
            "--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--secure-port", str(api_port),
            "--cert-dir", state / "pki", "--token-auth-file", state / "tokens.csv", "--authorization-mode", "RBAC",
            "--service-cluster-ip-range", "198.19.0.0/16", "--service-account-issuer", "https://kubernetes.default.svc",
            "--service-account-key-file", state / "sa.key", "--service-account-signing-key-file", state / "sa.key",
            "--endpoint-reconciler-type", "none",
            # No controller manager makes the service accounts that this plugin asks for.
            "--disable-admission-plugins", "ServiceAccount",
        ],
    }  # fmt: skip
    processes = []
    try:
        for name, command in commands.items():
            with (state / f"{name}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [str(part) for part in command],
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        preexec_fn=die_with_parent,
                    )
                )
        _await_ready(f"https://127.0.0.1:{api_port}/readyz", token, processes, state)
        kubeconfig = state / "kubeconfig"
        kubeconfig.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
            "contexts: [{name: c, context: {cluster: c, user: admin}}]\n"
            f'clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:{api_port}", '
            f'certificate-authority: "{state}/pki/apiserver.crt", tls-server-name: kubernetes}}}}]\n'
            f'users: [{{name: admin, user: {{token: "{token}"}}}}]\n'
        )
        yield kubeconfig
    finally:
        # What they hold goes with them. Asked to end, a server waits for its connections and for an etcd that is gone.
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        shutil.rmtree(state, ignore_errors=True)


def _await_ready(url: str, token: str, processes: list[subprocess.Popen[bytes]], state: Path) -> None:
    context = ssl._create_unverified_context()  # the certificate is made by the server itself, on loopback
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, context=context, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            logs = "".join(p.read_text(errors="replace")[-2000:] for p in state.glob("*.log"))
            if any(process.poll() is not None for process in processes):
                raise RuntimeError(f"a part of the control plane ended:\n{logs}") from None
            if time.monotonic() > deadline:
                raise RuntimeError(f"kube-apiserver not ready in {READY_TIMEOUT_S:.0f} s:\n{logs}") from None
            time.sleep(0.2)


if __name__ == "__main__":
    with control_plane() as kubeconfig:
        environment = os.environ | {"KUBECONFIG": str(kubeconfig), "PATH": f"{binaries()}:{os.environ['PATH']}"}
        sys.exit(subprocess.run(sys.argv[1:] or ["kubectl", "version"], env=environment).returncode)
