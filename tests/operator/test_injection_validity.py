"""A pod that the API server takes without the sidecar, it takes with it: asked of a real one, by dry runs."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from injection_pods import CACHE, GUARANTEED, INSTALL, MODELS, MODELS_MOUNT, SHAPES, engine, patched, pod, policy, pool
from policy_cases import resources

from trimtab_operator.api.policy import PolicyError, PolicySpec
from trimtab_operator.injection.outcome import Injection, Skip
from trimtab_operator.injection.pod_injection import inject
from trimtab_operator.kube import NAMESPACES, PODS, POLICIES, Kube, KubeError, Object

SEED = 20_260
LIMITED: Object = {"limits": {"cpu": "1", "memory": "1Gi"}}
REQUIRED: Object = {"limits.cpu": "100", "limits.memory": "100Gi", "requests.cpu": "100", "requests.memory": "100Gi"}


@pytest.fixture
async def place(kube: Kube, namespace: str) -> str:
    await kube._json("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", body={"metadata": {"name": "default"}})
    return namespace


async def refusal(kube: Kube, namespace: str, body: Object) -> str | None:
    try:
        await kube._json("POST", PODS.path(namespace), query={"dryRun": "All"}, body=body)
    except KubeError as error:
        return str(error)
    return None


async def stays_valid(kube: Kube, namespace: str, body: Object, *ports: int, **sidecar: Any) -> Object:
    """The pod with its sidecar, or as it is where it is left so."""
    assert await refusal(kube, namespace, body) is None
    result = inject(body, pool(*ports, namespace=namespace), policy(**sidecar), INSTALL, "trimtab-chat-store")
    if isinstance(result, Skip):
        return body
    after = patched(body, result.patch)
    assert await refusal(kube, namespace, after) is None
    again = inject(after, pool(*ports, namespace=namespace), policy(**sidecar), INSTALL, "trimtab-chat-store")
    assert isinstance(again, Injection)
    assert again.patch == []
    return after


def mounting(*paths: str, **fields: Any) -> Object:
    return pod(
        engine(volumeMounts=[{"name": "models", "mountPath": path} for path in paths], **fields), volumes=[MODELS]
    )


def noted(size_bytes: int) -> Object:
    body = pod(engine("--model", "m"))
    body["metadata"]["annotations"] = {"a": "x" * (size_bytes - 1)}
    return body


def on_node(*ports: int) -> Object:
    return pod(engine("--model", "m", ports=[{"containerPort": port} for port in ports]), hostNetwork=True)


ODD: dict[str, Object] = {
    "a volume in our place": mounting("/var/run/trimtab"),
    "volumes in all our places": mounting("/var/run/trimtab", "/trimtab-state", "/trimtab-state-2"),
    "a volume over everything": mounting("/"),
    "one place written twice": mounting("/models", "/models/", "/root", "/root/", "/root/.cache/huggingface"),
    "a place that is not absolute": mounting("models", "//models"),
    "annotations without room": noted(256 << 10),
    "annotations with too little room": noted((256 << 10) - 100),
    "the last port of the node": on_node(65_535, 55_535),
    "names of ours for volumes": pod(
        engine("--model", "/models/a", volumeMounts=[{"name": "trimtab-sidecar", "mountPath": "/models"}]),
        volumes=[{"name": "trimtab-sidecar", "secret": {"secretName": "s"}}],
    ),
    "a home of ours": pod(
        engine("--model", "m", volumeMounts=[{"name": "trimtab-home", "mountPath": "/root/.cache"}]),
        volumes=[{"name": "trimtab-home", "emptyDir": {}}],
    ),
    "the whole pod's amounts, all used": pod(
        engine("--model", "m", resources=LIMITED), resources={**LIMITED, "requests": LIMITED["limits"]}
    ),
    "a name of our metrics port": pod(
        engine("--model", "m", ports=[{"containerPort": 8000}, {"containerPort": 9091, "name": "trimtab-metrics"}])
    ),
    "another user namespace": pod(engine("--model", "m"), hostUsers=False, shareProcessNamespace=True),
    "volumes with propagation": pod(
        engine(
            "--model",
            "/models/a",
            volumeMounts=[{**MODELS_MOUNT, "mountPropagation": "HostToContainer"}],
        ),
        volumes=[MODELS],
    ),
}
SIDECARS: list[dict[str, Any]] = [
    {},
    {"kind": "Container"},
    {"resources": {"requests": {"memory": "2Gi"}}},
    {"resources": {"limits": {"cpu": "2", "hugepages-2Mi": "2Mi", "a.example/nic": 1}, "requests": {"cpu": "1"}}},
]


@pytest.mark.parametrize("sidecar", SIDECARS, ids=["as it is", "ordinary", "memory", "all sorts"])
async def test_a_pod_that_is_valid_stays_so(kube: Kube, place: str, sidecar: dict[str, Any]) -> None:
    for name, body in {**ODD, **{shape: make() for shape, make in SHAPES.items()}}.items():
        ports = (55_535,) if "last port" in name else (8000,)
        await stays_valid(kube, place, body, *ports, **sidecar)


def mixtures(rng: random.Random) -> Iterator[Object]:
    """Pods put together by chance."""
    paths = ["/", "/var", "/var/run", "/var/run/trimtab", "/run/x", "/root", "/root/.cache", "/root/.cache/huggingface"]
    paths += ["/models", "/models/", "/models/a", "/opt", "/usr", "/trimtab-state", "data", "/data/../root"]
    volumes = [CACHE, MODELS, {"name": "trimtab-sidecar", "emptyDir": {}}, {"name": "trimtab-home", "emptyDir": {}}]
    for _ in itertools.repeat(None, 40):
        mounts = [
            {"name": rng.choice(volumes)["name"], "mountPath": path, "readOnly": rng.random() < 0.3}
            for path in rng.sample(paths, rng.randrange(len(paths)))
        ]
        args = rng.choice([[], ["--model", "/models/a"], ["--model", "Qwen/Q"], ["--model=$(M)"], ["--model", "/root"]])
        ports = [{"containerPort": port} for port in rng.sample([8000, 9091, 9092, 18000, 65535], rng.randrange(4))]
        amounts = rng.choice([{}, LIMITED, GUARANTEED, {"requests": {"cpu": "1", "memory": "1Gi"}}])
        security = rng.choice([{}, {"runAsUser": 0}, {"runAsUser": 1000, "runAsNonRoot": True}, {"runAsGroup": 7}])
        env = rng.choice([[], [{"name": "M", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}] * 2])
        spec: Object = {"hostNetwork": True} if rng.random() < 0.3 else {}
        if rng.random() < 0.3:
            spec["resources"] = {"limits": {"cpu": "9", "memory": "65Gi"}, "requests": {"cpu": "9", "memory": "65Gi"}}
        main = engine(*args, port=None, ports=ports, volumeMounts=mounts, resources=amounts, env=env)
        yield pod({**main, "securityContext": security}, volumes=volumes, **spec)


async def test_pods_put_together_by_chance_stay_valid(kube: Kube, place: str) -> None:
    print("seed", SEED)
    rng = random.Random(SEED)
    for body in mixtures(rng):
        await stays_valid(kube, place, body, **rng.choice(SIDECARS))


async def test_a_restricted_namespace_takes_the_sidecar(kube: Kube, place: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await kube.merge(NAMESPACES, None, place, {"metadata": {"labels": labels}})
    allowed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    body = pod(
        engine("--model", "/models/a", securityContext=allowed, volumeMounts=[MODELS_MOUNT]),
        volumes=[MODELS],
        securityContext=security,
    )
    after = await stays_valid(kube, place, body)
    assert "initContainers" in after["spec"]
    assert await refusal(kube, place, pod(engine("--model", "m"))) is not None


@pytest.mark.parametrize("sidecar", SIDECARS, ids=["as it is", "ordinary", "memory", "all sorts"])
async def test_a_quota_that_wants_amounts_of_every_container_gets_them(
    kube: Kube, place: str, sidecar: dict[str, Any]
) -> None:
    limits: Object = {"cpu": "1", "memory": "1Gi"}
    ranges = {"metadata": {"name": "l"}, "spec": {"limits": [{"type": "Container", "default": limits}]}}
    await kube._json("POST", f"/api/v1/namespaces/{place}/limitranges", body=ranges)
    # Nobody keeps its status here, so it is given one: all is free.
    quotas = f"/api/v1/namespaces/{place}/resourcequotas"
    quota = await kube._json("POST", quotas, body={"metadata": {"name": "q"}, "spec": {"hard": REQUIRED}})
    quota["status"] = {"hard": REQUIRED, "used": dict.fromkeys(REQUIRED, "0")}
    await kube._json("PUT", f"{quotas}/q/status", body=quota)
    # As the API server hands it on: the defaults of the LimitRange are in it.
    await stays_valid(
        kube, place, pod(engine("--model", "m", resources={"limits": limits, "requests": limits})), **sidecar
    )


NAMES = ["cpu", "memory", "ephemeral-storage", "hugepages-2Mi", "hugepages-1Gi", "hugepages-x", "nvidia.com/gpu"]
NAMES += ["kubernetes.io/x", "x.kubernetes.io/y", "requests.a.example/b", "A.example/b", "a.example/b_", "storage"]
AMOUNTS: list[str | int] = [0, 1, 2, "1", "0.5", "500m", "1Mi", "2Mi", "3Mi", "1Gi", "2097152", "1e3", "1k"]


async def test_amounts_that_a_policy_may_have_a_pod_may_have(kube: Kube, place: str) -> None:
    """The CRD and the operator's reader agree, and what they accept is accepted in a container."""
    print("seed", SEED)
    rng = random.Random(SEED)
    accepted = 0
    for number in range(250):
        asked: dict[str, Any] = {}
        names = rng.sample(NAMES, rng.randrange(1, 4))
        for kind in ("limits", "requests"):
            asked[kind] = {name: rng.choice(AMOUNTS) for name in names if rng.random() < 0.7}
        if rng.random() < 0.5:
            asked["requests"] = {name: asked["limits"].get(name, value) for name, value in asked["requests"].items()}
        spec = resources("sidecar", **asked)
        try:
            PolicySpec.of(spec)
            fault = None
        except PolicyError as error:
            fault = str(error)
        about = {"apiVersion": POLICIES.api_version, "kind": POLICIES.kind, "metadata": {"name": f"p{number}"}}
        try:
            await kube._json("POST", POLICIES.path(place), query={"dryRun": "All"}, body={**about, "spec": spec})
            refused = None
        except KubeError as error:
            refused = str(error)
        assert (fault is None) == (refused is None), (asked, fault, refused)
        if fault is None:
            accepted += 1
            body = pod({"name": "x", "image": "x", "resources": asked})
            assert await refusal(kube, place, body) is None, asked
    assert accepted > 40
