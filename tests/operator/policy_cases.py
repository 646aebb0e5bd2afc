"""Policies that are right and policies that are wrong, for the API server and for the operator's own reader alike."""

from typing import Any

Spec = dict[str, Any]
TARGET: Spec = {"targetRef": {"name": "chat"}}


def spec(**parts: Any) -> Spec:
    return TARGET | parts


def resources(part: str = "picker", **amounts: Any) -> Spec:
    return spec(**{part: {"resources": amounts}})


def toleration(**fields: Any) -> Spec:
    return spec(picker={"tolerations": [fields]})


GOOD: dict[str, Spec] = {
    "the target alone": TARGET,
    "the target in full": {
        "targetRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "x" * 253}
    },
    "a target with dots": {"targetRef": {"name": "a.b-c.9"}},
    "empty parts": spec(fallback={}, picker={}, standalone={}, sidecar={}),
    "nulls where null is said": spec(batchLimit=None, dataParallelRanks=None, standalone={"enabled": None}),
    "every mode: Product": spec(mode="Product"),
    "every mode: RoundRobin": spec(mode="RoundRobin"),
    "detectors that only tell": spec(hotspots={"mode": "Alarm", "windowSeconds": 5}),
    "no detectors": spec(hotspots={"mode": "Off"}),
    "every mode: LeastRequest": spec(mode="LeastRequest", fallback={"alarms": 3}),
    "least numbers": spec(
        batchLimit=1,
        dataParallelRanks=1,
        fallback={"alarms": 1, "windowSeconds": 5, "quietSeconds": 5, "minimumStaySeconds": 0},
        picker={"replicas": 1, "streamSecondsMax": 1, "bodyBytesMax": 1024},
        standalone={"replicas": 1, "port": 1},
    ),
    "most numbers": spec(
        batchLimit=100_000,
        dataParallelRanks=256,
        fallback={"alarms": 1000, "windowSeconds": 3600, "quietSeconds": 86400, "minimumStaySeconds": 86400},
        picker={"replicas": 64, "streamSecondsMax": 86400, "bodyBytesMax": 1 << 30},
        standalone={"replicas": 64, "port": 65535},
    ),
    "images": spec(picker={"image": "r.example:5000/a/b_c:v1.2"}, sidecar={"image": "x@sha256:" + "0" * 64}),
    "amounts of every kind": resources(
        requests={"cpu": 1, "memory": "1e3", "ephemeral-storage": "1.5Gi", "hugepages-2Mi": "4Mi", "a.example/gpu": 0},
        limits={
            "cpu": "1500m",
            "memory": "0.5Gi",
            "ephemeral-storage": "2000M",
            "hugepages-2Mi": "4194304",
            "a.example/gpu": "0",
            "b.example/nic": 3,
        },
    ),
    "a request as high as its limit, written otherwise": resources(requests={"cpu": "1000m"}, limits={"cpu": 1}),
    "just memory enough for one body": spec(
        picker={"bodyBytesMax": 64 << 20, "resources": {"limits": {"memory": "256Mi"}}}
    ),
    "a limit below what a picker needs, elsewhere": resources("sidecar", limits={"memory": "64Mi"}),
    "where pickers may run": spec(
        picker={
            "nodeSelector": {"kubernetes.io/arch": "amd64", "plain": ""},
            "tolerations": [
                {"operator": "Exists"},
                {"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30},
                {"key": "example.com/pool", "operator": "Equal", "value": "a_b", "effect": "NoSchedule"},
                {"key": "short", "value": "x"},
            ],
            "priorityClassName": "system-cluster-critical",
        }
    ),
    "all of Envoy": spec(
        standalone={
            "enabled": True,
            "serviceType": "LoadBalancer",
            "serviceAnnotations": {"service.beta.kubernetes.io/aws-load-balancer-internal": "true", "plain": "x y"},
            "accessLog": True,
            "image": "envoy:1",
            "nodeSelector": {"edge": "yes"},
            "tolerations": [{"key": "edge", "operator": "Exists"}],
            "priorityClassName": "front",
        }
    ),
    "requests that wait": spec(
        batchLimit=8,
        whenFull={"action": "Wait", "waitSeconds": 120, "requestsMax": 1, "tenantHeader": "X-Team_1.a"},
    ),
    "classes of every kind": spec(
        classHeader="x-class",
        classes=[
            {"name": "gold", "weightPercent": 400, "objectives": ["chat-gold"], "models": ["org/Model:7b"]},
            {"name": "bulk", "weightPercent": 1},
            {"name": "heaviest.one", "weightPercent": 100_000},
            {"name": "maths", "experts": [{"first": 0, "last": 0, "share": 3}, {"first": 8, "last": 1023, "share": 0}]},
        ],
        expertCosts=[
            {"endpoints": ["pod-a", "10.0.0.1:8000/3"], "costs": [{"first": 3, "last": 3, "percent": 10_000}]},
            {"endpoints": []},
        ],
    ),
    "the way to the endpoints": spec(network="Measured", logAboveTokens=32_768),
    "all of the sidecar": spec(
        sidecar={"inject": True, "engine": "sglang", "engineContainer": "main", "kind": "Container"}
    ),
}

BAD: dict[str, tuple[Spec, str]] = {
    "no target": ({}, "spec.targetRef"),
    "a target without a name": ({"targetRef": {}}, "spec.targetRef.name"),
    "an empty name": ({"targetRef": {"name": ""}}, "spec.targetRef.name"),
    "a name that no pool can have": ({"targetRef": {"name": "My_Pool"}}, "spec.targetRef.name"),
    "a name with a line end": ({"targetRef": {"name": "chat\n"}}, "spec.targetRef.name"),
    "a name that is too long": ({"targetRef": {"name": "x" * 254}}, "spec.targetRef.name"),
    "another kind": ({"targetRef": {"name": "a", "kind": "Service"}}, "spec.targetRef.kind"),
    "another group": ({"targetRef": {"name": "a", "group": ""}}, "spec.targetRef.group"),
    "a namespace": ({"targetRef": {"name": "a", "namespace": "b"}}, "spec.targetRef.namespace"),
    "a name for a target": ({"targetRef": "chat"}, "spec.targetRef"),
    "no such field": (spec(piker={}), "spec.piker"),
    "no such field below": (spec(picker={"replica": 3}), "spec.picker.replica"),
    "a mode in small letters": (spec(mode="auto"), "spec.mode"),
    "no such mode": (spec(mode="Random"), "spec.mode"),
    "a limit of nothing": (spec(batchLimit=0), "spec.batchLimit"),
    "a limit beyond reason": (spec(batchLimit=100_001), "spec.batchLimit"),
    "no such action": (spec(whenFull={"action": "Queue"}), "spec.whenFull.action"),
    "a wait of nothing": (spec(whenFull={"waitSeconds": 0}), "spec.whenFull.waitSeconds"),
    "a wait without end": (spec(whenFull={"waitSeconds": 121}), "spec.whenFull.waitSeconds"),
    "a header with a colon": (spec(whenFull={"tenantHeader": ":path"}), "spec.whenFull.tenantHeader"),
    "a header with a space": (spec(classHeader="x class"), "spec.classHeader"),
    "a class without a name": (spec(classes=[{"weightPercent": 5}]), "spec.classes[0].name"),
    "a class in capitals": (spec(classes=[{"name": "Gold"}]), "spec.classes[0].name"),
    "a weightless class": (spec(classes=[{"name": "a", "weightPercent": 0}]), "spec.classes[0].weightPercent"),
    "a class twice": (spec(classes=[{"name": "a"}, {"name": "b"}, {"name": "a"}]), "spec.classes"),
    "too many classes": (spec(classes=[{"name": f"c{n}"} for n in range(17)]), "spec.classes"),
    "an expert too many": (
        spec(classes=[{"name": "a", "experts": [{"first": 0, "last": 1024, "share": 1}]}]),
        "spec.classes[0].experts[0].last",
    ),
    "experts backwards": (
        spec(classes=[{"name": "a", "experts": [{"first": 2, "last": 1, "share": 1}]}]),
        "spec.classes[0].experts[0].last",
    ),
    "experts for nothing": (
        spec(expertCosts=[{"endpoints": ["a"], "costs": [{"first": 2, "last": 2, "percent": 0}]}]),
        "spec.expertCosts[0].costs[0].percent",
    ),
    "costs backwards": (
        spec(expertCosts=[{"endpoints": ["a"], "costs": [{"first": 2, "last": 1, "percent": 9}]}]),
        "spec.expertCosts[0].costs[0].last",
    ),
    "a network in small letters": (spec(network="measured"), "spec.network"),
    "a logarithm of nothing": (spec(logAboveTokens=0), "spec.logAboveTokens"),
    "no ranks": (spec(dataParallelRanks=0), "spec.dataParallelRanks"),
    "too many ranks": (spec(dataParallelRanks=257), "spec.dataParallelRanks"),
    "a number in quotes": (spec(picker={"replicas": "3"}), "spec.picker.replicas"),
    "half a picker": (spec(picker={"replicas": 1.5}), "spec.picker.replicas"),
    "true for a number": (spec(picker={"replicas": True}), "spec.picker.replicas"),
    "no pickers": (spec(picker={"replicas": 0}), "spec.picker.replicas"),
    "too many pickers": (spec(picker={"replicas": 65}), "spec.picker.replicas"),
    "a word for a bool": (spec(picker={"tls": "yes"}), "spec.picker.tls"),
    "an image with a space": (spec(picker={"image": "a b"}), "spec.picker.image"),
    "an image that is too long": (spec(sidecar={"image": "x" * 513}), "spec.sidecar.image"),
    "streams without end": (spec(picker={"streamSecondsMax": 86401}), "spec.picker.streamSecondsMax"),
    "bodies of nothing": (spec(picker={"bodyBytesMax": 1023}), "spec.picker.bodyBytesMax"),
    "bodies as a quantity": (spec(picker={"bodyBytesMax": "32Mi"}), "spec.picker.bodyBytesMax"),
    "no such level": (spec(picker={"logLevel": "INFO"}), "spec.picker.logLevel"),
    "a class that is no name": (spec(picker={"priorityClassName": "Very High"}), "spec.picker.priorityClassName"),
    "no alarms": (spec(fallback={"alarms": 0}), "spec.fallback.alarms"),
    "too wide a window": (spec(fallback={"windowSeconds": 3601}), "spec.fallback.windowSeconds"),
    "too little quiet": (spec(fallback={"quietSeconds": 4}), "spec.fallback.quietSeconds"),
    "a stay in the past": (spec(fallback={"minimumStaySeconds": -1}), "spec.fallback.minimumStaySeconds"),
    "another thing for detectors to do": (spec(hotspots={"mode": "Panic"}), "spec.hotspots.mode"),
    "too wide a window of detectors": (spec(hotspots={"windowSeconds": 3601}), "spec.hotspots.windowSeconds"),
    "a fallback by word": (spec(fallback="off"), "spec.fallback"),
    "port zero": (spec(standalone={"port": 0}), "spec.standalone.port"),
    "a port too far": (spec(standalone={"port": 65536}), "spec.standalone.port"),
    "no such type of Service": (spec(standalone={"serviceType": "ExternalName"}), "spec.standalone.serviceType"),
    "no Envoys": (spec(standalone={"replicas": 0}), "spec.standalone.replicas"),
    "no such engine": (spec(sidecar={"engine": "vLLM"}), "spec.sidecar.engine"),
    "a container of no name": (spec(sidecar={"engineContainer": "Main"}), "spec.sidecar.engineContainer"),
    "no such kind of sidecar": (spec(sidecar={"kind": "native"}), "spec.sidecar.kind"),
    "a misspelt resource": (resources(requests={"memroy": "1Gi"}), "spec.picker.resources.requests"),
    "a resource in capitals": (resources("standalone", limits={"CPU": 1}), "spec.standalone.resources.limits"),
    "an amount of no unit": (resources(limits={"cpu": "1x"}), "spec.picker.resources.limits.cpu"),
    "an amount with a space": (resources(limits={"memory": "1 Gi"}), "spec.picker.resources.limits.memory"),
    "an amount below nothing": (resources(limits={"cpu": -1}), "spec.picker.resources.limits.cpu"),
    "an amount below nothing, as text": (resources(limits={"cpu": "-1"}), "spec.picker.resources.limits.cpu"),
    "a fraction without quotes": (resources(limits={"cpu": 0.5}), "spec.picker.resources.limits.cpu"),
    "too many resources": (
        resources(limits={f"a.example/r{n}": 1 for n in range(17)}),
        "spec.picker.resources.limits",
    ),
    "claims": (resources(claims=[]), "spec.picker.resources.claims"),
    "a request above its limit": (
        resources("sidecar", requests={"memory": "257Mi"}, limits={"memory": "256Mi"}),
        "spec.sidecar.resources.requests",
    ),
    "a request above its limit, in other units": (
        resources("standalone", requests={"cpu": 2}, limits={"cpu": "1999m"}),
        "spec.standalone.resources.requests",
    ),
    "a resource of no domain": (resources(limits={"gpu/": 1}), "spec.picker.resources.limits"),
    "a resource of a quota": (
        resources("sidecar", limits={"requests.a.example/gpu": 1}),
        "spec.sidecar.resources.limits",
    ),
    "half a card": (resources("sidecar", limits={"nvidia.com/gpu": "0.5"}), "spec.sidecar.resources.limits"),
    "a card that is only asked for": (
        resources("sidecar", requests={"nvidia.com/gpu": 1}),
        "spec.sidecar.resources.requests",
    ),
    "fewer cards than the limit": (
        resources("standalone", requests={"nvidia.com/gpu": 1}, limits={"nvidia.com/gpu": 2}),
        "spec.standalone.resources.requests",
    ),
    "huge pages that are only asked for": (
        resources("sidecar", requests={"cpu": 1, "hugepages-2Mi": "2Mi"}),
        "spec.sidecar.resources.requests",
    ),
    "half a huge page": (
        resources("sidecar", limits={"cpu": 1, "hugepages-2Mi": "1Mi"}),
        "spec.sidecar.resources.limits",
    ),
    "huge pages of no size": (resources(limits={"cpu": 1, "hugepages-": "2Mi"}), "spec.picker.resources.limits"),
    "huge pages alone": (resources("sidecar", limits={"hugepages-2Mi": "2Mi"}), "spec.sidecar.resources.limits"),
    "memory for less than one body": (
        spec(picker={"bodyBytesMax": 64 << 20, "resources": {"limits": {"memory": "255Mi"}}}),
        "spec.picker.resources.limits",
    ),
    "a label's key with a space": (spec(picker={"nodeSelector": {"a b": "c"}}), "spec.picker.nodeSelector"),
    "a label's value with a space": (spec(picker={"nodeSelector": {"a": "b c"}}), "spec.picker.nodeSelector.a"),
    "a label that is a number": (spec(picker={"nodeSelector": {"a": 1}}), "spec.picker.nodeSelector.a"),
    "a label's key with a space, for Envoy": (
        spec(standalone={"nodeSelector": {"a b": "c"}}),
        "spec.standalone.nodeSelector",
    ),
    "an annotation with a space": (
        spec(standalone={"serviceAnnotations": {"a b": "c"}}),
        "spec.standalone.serviceAnnotations",
    ),
    "an annotation of ours": (
        spec(standalone={"serviceAnnotations": {"trimtab.dev/pool": "x"}}),
        "spec.standalone.serviceAnnotations",
    ),
    "an annotation that is true": (
        spec(standalone={"serviceAnnotations": {"a.example/internal": True}}),
        "spec.standalone.serviceAnnotations.a.example/internal",
    ),
    "a value beside Exists, for Envoy": (
        spec(standalone={"tolerations": [{"key": "k", "operator": "Exists", "value": "v"}]}),
        "spec.standalone.tolerations",
    ),
    "a toleration of nothing": (toleration(), "spec.picker.tolerations"),
    "a toleration without a key": (toleration(value="x"), "spec.picker.tolerations"),
    "a value beside Exists": (toleration(key="k", operator="Exists", value="v"), "spec.picker.tolerations"),
    "a time without an effect": (toleration(key="k", tolerationSeconds=3), "spec.picker.tolerations"),
    "a time beside another effect": (
        toleration(key="k", effect="NoSchedule", tolerationSeconds=3),
        "spec.picker.tolerations",
    ),
    "no such operator": (toleration(key="k", operator="In"), "spec.picker.tolerations[0].operator"),
    "no such effect": (toleration(key="k", effect="NoRun"), "spec.picker.tolerations[0].effect"),
    "no such field of a toleration": (toleration(key="k", values=[]), "spec.picker.tolerations[0].values"),
    "too many tolerations": (spec(picker={"tolerations": [{"key": "k"}] * 33}), "spec.picker.tolerations"),
}
"""The field that is wrong, as the API server names it. Nulls are not here: it takes them away itself."""
