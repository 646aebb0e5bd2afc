"""A real API server and a real Envoy judge what the operator makes."""

import asyncio
import json
import subprocess
from pathlib import Path

import envoy
import pytest
from child_objects import POLICIES, install, named, objects, policy, pool
from control_plane import binaries

from trimtab_operator.children.desired import desired
from trimtab_operator.children.store_secret import StoreAccess
from trimtab_operator.kube import Object

LONG = "llama-4-maverick-17b-128e-instruct-fp8-with-a-name-that-nobody-can-remember." * 3 + "x"
POOLS: dict[str, Object] = {
    "one port": {},
    "eight ports over h2c": {
        "targetPorts": [{"number": 8000 + n} for n in range(8)],
        "appProtocol": "kubernetes.io/h2c",
    },
    "picker on a privileged port": {"endpointPickerRef": {"name": "trimtab-chat", "port": {"number": 443}}},
}


async def dry_run(kube_config: Path, bodies: list[Object]) -> str:
    """What kubectl says of a strict server-side dry run."""
    words = [str(binaries() / "kubectl"), "--kubeconfig", str(kube_config)]
    words += ["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"]
    text = "\n---\n".join(json.dumps(body) for body in bodies)
    ran = await asyncio.to_thread(
        subprocess.run, words, input=text, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert ran.returncode == 0, ran.stdout
    return str(ran.stdout)


@pytest.mark.parametrize("shape", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("spec", POLICIES.values(), ids=POLICIES)
async def test_the_api_server_takes_every_object(
    kube_config: Path, namespace: str, spec: Object, shape: Object
) -> None:
    bodies = objects(spec, of=pool(namespace=namespace, **shape))
    said = await dry_run(kube_config, bodies)
    assert said.count("serverside-applied") == len(bodies)
    assert "Warning" not in said


async def test_the_api_server_takes_the_names_of_the_longest_pool(kube_config: Path, namespace: str) -> None:
    bodies = objects(of=pool(LONG[:253], namespace))
    assert (await dry_run(kube_config, bodies)).count("serverside-applied") == len(bodies)


async def test_a_strict_dry_run_does_refuse_what_is_wrong(kube_config: Path, namespace: str) -> None:
    bodies = objects(of=pool(namespace=namespace))
    named(bodies, "Deployment", "trimtab-chat")["spec"]["template"]["spec"]["securityContex"] = {}
    with pytest.raises(AssertionError, match="securityContex: field not declared"):
        await dry_run(kube_config, bodies)


async def test_pull_secrets_and_another_cluster_domain_are_taken(kube_config: Path, namespace: str) -> None:
    settings = install(image_pull_secrets=("registry",), cluster_domain="corp.example")
    access = StoreAccess(url="redis://u:p@h", secret="s", is_own_user=False)
    bodies = desired(pool(namespace=namespace), policy(), settings, access)
    await dry_run(kube_config, bodies)
    text = named(bodies, "ConfigMap", "trimtab-chat-envoy")["data"]["envoy.json"]
    assert f"trimtab-chat.{namespace}.svc.corp.example" in text


@pytest.mark.parametrize("shape", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("spec", [s for s in POLICIES.values() if s.get("standalone", {}).get("enabled") is not False])
async def test_envoy_takes_its_configuration(tmp_path: Path, spec: Object, shape: Object) -> None:
    config = tmp_path / "envoy.json"
    config.write_text(named(objects(spec, of=pool(**shape)), "ConfigMap", "trimtab-chat-envoy")["data"]["envoy.json"])
    binary = Path(envoy.__file__).parent / "_bin" / "envoy"
    words = [binary, "--mode", "validate", "-c", config, "--disable-hot-restart"]
    ran = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
