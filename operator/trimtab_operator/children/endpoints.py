"""The headless Service over a pool's pods: where an Envoy, or anybody else, finds every engine by DNS.

The one rule: it selects exactly what the pool selects. Which of the pods are endpoints, and which are good ones, is
told by the control document and decided by pickers.
"""

from collections.abc import Iterable, Mapping

from trimtab_operator.api.pool import Pool
from trimtab_operator.children.labels import metadata
from trimtab_operator.children.names import endpoints_name
from trimtab_operator.kube import Object


def endpoints_service(pool: Pool) -> Object:
    """One port for each target port."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pool, endpoints_name(pool.key.name), "endpoints"),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": False,
            "selector": dict(pool.selector),
            "ports": [
                {
                    "name": f"port-{port}",
                    "protocol": "TCP",
                    "port": port,
                    "targetPort": port,
                    "appProtocol": pool.app_protocol,
                }
                for port in dict.fromkeys(pool.target_ports)
            ],
        },
    }


def made_selector(children: Iterable[Object], pool_name: str) -> Mapping[str, str] | None:
    """By which the Service was made that is there: what the pool selected last of what can be selected."""
    for child in children:
        if child["kind"] == "Service" and child["metadata"]["name"] == endpoints_name(pool_name):
            return (child.get("spec") or {}).get("selector") or None
    return None
