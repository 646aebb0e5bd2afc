"""The MutatingWebhookConfiguration: when the API server asks the webhook, and what it does where that fails.

The one rule: a pod never waits for Trimtab, and none is refused because of it: failures are ignored, and nothing is
asked but for new pods in namespaces that opted in. The chart renders the same object; then only what the API server is
to trust is written here, so that no field has two writers.
"""

import base64
from dataclasses import dataclass
from typing import Final

from trimtab_operator.injection.marks import DISABLED, ENABLED, INJECT
from trimtab_operator.install import MANAGER
from trimtab_operator.kube import WEBHOOKS, Object

PATH: Final = "/inject"
TIMEOUT_S: Final = 3
WEBHOOK_NAME: Final = "inject.trimtab.dev"
NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
"""Label that every namespace carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookAddress:
    """Where the API server reaches the webhook: a Service in the operator's namespace, or a URL."""

    namespace: str
    service: str = "trimtab-webhook"
    port: int = 443
    url: str = ""
    """`https://host:port`, where the API server is not to go by a Service."""
    cluster_domain: str = "cluster.local"

    def hosts(self) -> tuple[str, ...]:
        """Names that the serving certificate must hold for."""
        if self.url:
            host = self.url.removeprefix("https://").partition("/")[0]
            bare = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.rpartition(":")[0] or host
            return (bare,)
        name = f"{self.service}.{self.namespace}.svc"
        return (name, f"{name}.{self.cluster_domain}")

    def client_config(self, bundle: bytes) -> Object:
        trusted = {"caBundle": base64.b64encode(bundle).decode()}
        if self.url:
            return {"url": f"{self.url.rstrip('/')}{PATH}", **trusted}
        service = {"name": self.service, "namespace": self.namespace, "path": PATH, "port": self.port}
        return {"service": service, **trusted}


def configuration_name(namespace: str) -> str:
    """Of the installation in that namespace: there may be several in a cluster."""
    return f"trimtab-injection-{namespace}"


def trusted_only(namespace: str, bundle: bytes) -> Object:
    """To be applied to a configuration that somebody else has made: one field of it."""
    return {
        "apiVersion": WEBHOOKS.api_version,
        "kind": WEBHOOKS.kind,
        "metadata": {"name": configuration_name(namespace)},
        "webhooks": [{"name": WEBHOOK_NAME, "clientConfig": {"caBundle": base64.b64encode(bundle).decode()}}],
    }


def webhook_configuration(address: WebhookAddress, bundle: bytes) -> Object:
    return {
        "apiVersion": WEBHOOKS.api_version,
        "kind": WEBHOOKS.kind,
        "metadata": {
            "name": configuration_name(address.namespace),
            "labels": {
                "app.kubernetes.io/managed-by": MANAGER,
                "app.kubernetes.io/name": "trimtab-webhook",
                "app.kubernetes.io/component": "webhook",
            },
        },
        "webhooks": [
            {
                "name": WEBHOOK_NAME,
                "clientConfig": address.client_config(bundle),
                "admissionReviewVersions": ["v1"],
                "failurePolicy": "Ignore",
                "timeoutSeconds": TIMEOUT_S,
                "sideEffects": "None",
                "reinvocationPolicy": "IfNeeded",
                "matchPolicy": "Equivalent",
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["pods"],
                        "scope": "Namespaced",
                    }
                ],
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": INJECT, "operator": "In", "values": [ENABLED]},
                        {"key": NAMESPACE_NAME, "operator": "NotIn", "values": ["kube-system", address.namespace]},
                    ]
                },
                "objectSelector": {"matchExpressions": [{"key": INJECT, "operator": "NotIn", "values": [DISABLED]}]},
                "matchConditions": [
                    # A pool selects by labels.
                    {"name": "has-labels", "expression": "has(object.metadata.labels)"},
                    # Copies of what a node runs by itself; nothing that is said of them changes anything.
                    {
                        "name": "not-a-mirror-pod",
                        "expression": "!has(object.metadata.annotations) || "
                        "!('kubernetes.io/config.mirror' in object.metadata.annotations)",
                    },
                ],
            }
        ],
    }
