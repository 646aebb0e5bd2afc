"""The Kubernetes API as this operator uses it: JSON objects by kind, server-side apply, lists in pages, watches.

The one rule: the official client does the talking (credentials, TLS, connections); here are the few calls that the
operator makes of it, on plain JSON, since its typed models cost ten times the memory and do not know our kinds.
It must not know what the objects mean. Nothing here retries: callers are level-based and come again.
"""

import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Self

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from trimtab_operator.install import MANAGER

Object = dict[str, Any]
"""A Kubernetes object as JSON."""

PAGE_OBJECTS: Final = 100
"""A page of engines' pods is ten times as large in memory as on the wire, and many pools may list at once."""
REQUEST_TIMEOUT_S: Final = 30.0
WATCH_SERVER_S: Final = 300
"""The server ends a watch after this long, so that none lives on half dead."""
WATCH_SILENCE_S: Final = 90.0
"""A watch that says nothing for this long (bookmarks come every minute) is taken as broken."""
_PHRASES: Final = {int(status): status.phrase for status in HTTPStatus}
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind and where it is served."""

    api_version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path; without a namespace: of all namespaces, or of the cluster."""
        prefix = "/api" if "/" not in self.api_version else "/apis"
        parts = [prefix, self.api_version]
        if namespace is not None and self.is_namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


PODS: Final = Resource("v1", "pods", "Pod")
NODES: Final = Resource("v1", "nodes", "Node", is_namespaced=False)
NAMESPACES: Final = Resource("v1", "namespaces", "Namespace", is_namespaced=False)
SERVICES: Final = Resource("v1", "services", "Service")
SECRETS: Final = Resource("v1", "secrets", "Secret")
CONFIG_MAPS: Final = Resource("v1", "configmaps", "ConfigMap")
EVENTS: Final = Resource("events.k8s.io/v1", "events", "Event")
DEPLOYMENTS: Final = Resource("apps/v1", "deployments", "Deployment")
PDBS: Final = Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
LEASES: Final = Resource("coordination.k8s.io/v1", "leases", "Lease")
WEBHOOKS: Final = Resource(
    "admissionregistration.k8s.io/v1",
    "mutatingwebhookconfigurations",
    "MutatingWebhookConfiguration",
    is_namespaced=False,
)
CRDS: Final = Resource(
    "apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", is_namespaced=False
)
POOLS: Final = Resource("inference.networking.k8s.io/v1", "inferencepools", "InferencePool")
POLICIES: Final = Resource("trimtab.dev/v1alpha1", "schedulingpolicies", "SchedulingPolicy")
KINDS: Final = {
    resource.kind: resource
    for resource in (SERVICES, SECRETS, CONFIG_MAPS, DEPLOYMENTS, PDBS, POOLS, POLICIES, PODS, WEBHOOKS, NAMESPACES)
}
"""Kinds that `apply` and `delete` take by the object's own `kind`."""


class KubeError(Exception):
    """The API server refused: `status` (HTTP) and its own words. `status` 0: it was not reached."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        """The API's word: NotFound, Conflict, AlreadyExists, Invalid, Forbidden, Expired, ..."""
        self.message = message
        self.retry_after_s = retry_after_s
        """How long the server wants to be left alone."""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """`type`: ADDED, MODIFIED, DELETED or BOOKMARK."""

    type: str
    object: Object


class Kube:
    """One connection pool to one API server. Every method raises KubeError."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self.refusals: Counter[int] = Counter()
        """Calls that raised, by HTTP status; 0: not reached."""

    @classmethod
    async def connect(cls, kubeconfig: str | None = None) -> Self:
        """By the pod's service account where there is one, else by a kubeconfig (KUBECONFIG, ~/.kube/config)."""
        return cls(ApiClient(await cluster_configuration(kubeconfig)))

    async def close(self) -> None:
        """Also what is under way."""
        pool = self._client.rest_client.pool_manager
        # Neither is there before the first call.
        if pool is not None and pool.connector is not None:
            await pool.connector.close(abort_ssl=True)
        await self._client.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """None if there is no such object."""
        try:
            return await self._json("GET", resource.path(namespace, name))
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def kinds(self, api_version: str) -> frozenset[str]:
        """That are served in this group and version. Everybody may ask."""
        prefix = "/api" if "/" not in api_version else "/apis"
        try:
            found = await self._json("GET", f"{prefix}/{api_version}")
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return frozenset()
            raise
        return frozenset(resource["kind"] for resource in found.get("resources") or ())

    async def version(self) -> tuple[int, int]:
        """Of Kubernetes, such as (1, 29). Everybody may ask."""
        found = await self._json("GET", "/version")
        numbers = [re.match(r"[0-9]+", str(found.get(part, ""))) for part in ("major", "minor")]
        if None in numbers:
            raise KubeError(0, "NoVersion", "the API server's version has no numbers")
        major, minor = (int(number[0]) for number in numbers if number is not None)
        return major, minor

    async def list_all(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> tuple[list[Object], str]:
        """All objects, read in pages, and the resource version to watch from."""
        found: list[Object] = []
        version = ""
        async for items, listed_at in self.pages(
            resource, namespace, label_selector=label_selector, field_selector=field_selector
        ):
            found.extend(items)
            version = listed_at
        return found, version

    async def pages(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> AsyncIterator[tuple[list[Object], str]]:
        """(objects, resource version), page by page, for callers that keep less than whole objects."""
        query = {"limit": str(PAGE_OBJECTS), "labelSelector": label_selector, "fieldSelector": field_selector}
        while True:
            page = await self._json("GET", resource.path(namespace), query=query)
            metadata = page.get("metadata", {})
            yield page.get("items") or [], metadata.get("resourceVersion", "")
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        resource_version: str,
        *,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncIterator[WatchEvent]:
        """Changes after that version, until the server ends the watch (start again from the last version seen).

        KubeError with status 410: the version is too old, list again.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_SERVER_S),
            "labelSelector": label_selector,
            "fieldSelector": field_selector,
        }
        limits = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=WATCH_SILENCE_S)
        response = await self._call("GET", resource.path(namespace), query=query, limits=limits)
        try:
            if response.status >= HTTPStatus.BAD_REQUEST:
                raise self._refused(response, await response.read())
            while line := await response.content.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    refusal = _refusal(int(event["object"].get("code", 500)), event["object"])
                    self.refusals[refusal.status] += 1
                    raise refusal
                yield WatchEvent(event["type"], event["object"])
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.refusals[0] += 1
            raise KubeError(0, "WatchBroken", f"{type(error).__name__}: {error}") from error
        finally:
            response.close()

    async def apply(self, body: Object, *, manager: str = MANAGER, subresource: str | None = None) -> Object:
        """Server-side apply, by force: what the operator says of an object's fields holds."""
        metadata = body["metadata"]
        path = KINDS[body["kind"]].path(metadata.get("namespace"), metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true"}
        return await self._json("PATCH", path, query=query, body=body, content_type=APPLY)

    async def create(self, resource: Resource, body: Object, *, is_dry_run: bool = False) -> Object:
        """`is_dry_run`: the answer is what would be created, webhooks asked; nothing is kept."""
        query = {"dryRun": "All"} if is_dry_run else None
        return await self._json("POST", resource.path(body["metadata"].get("namespace")), query=query, body=body)

    async def replace(self, resource: Resource, body: Object, *, subresource: str | None = None) -> Object:
        """Under the resourceVersion that the object carries: KubeError 409 if it has changed meanwhile."""
        metadata = body["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"], subresource)
        return await self._json("PUT", path, query={"fieldManager": MANAGER}, body=body)

    async def merge(
        self, resource: Resource, namespace: str | None, name: str, body: Object, *, subresource: str | None = None
    ) -> Object:
        """JSON merge patch."""
        path = resource.path(namespace, name, subresource)
        return await self._json("PATCH", path, query={"fieldManager": MANAGER}, body=body, content_type=MERGE)

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        grace_s: int | None = None,
    ) -> bool:
        """In the background; with a uid: that very object and none that was made since. False if it was not there."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            await self._json("DELETE", resource.path(namespace, name), body=options)
        except KubeError as error:
            if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                return False
            raise
        return True

    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        response = await self._call(
            method,
            path,
            query=query,
            body=body,
            content_type=content_type,
            limits=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        )
        try:
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.refusals[0] += 1
            raise KubeError(0, "Unreachable", f"{type(error).__name__}: {error}") from error
        finally:
            response.release()
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise self._refused(response, data)
        answer: Object = json.loads(data)
        return answer

    async def _call(
        self,
        method: str,
        path: str,
        *,
        limits: aiohttp.ClientTimeout,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> aiohttp.ClientResponse:
        parameters = [(name, value) for name, value in (query or {}).items() if value]
        try:
            _, url, headers, _, _ = await self._client.param_serialize(
                method,
                path,
                query_params=parameters,
                header_params={"Accept": "application/json", "Content-Type": content_type},
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(
                method, url, headers, body=body, _request_timeout=limits, _preload_content=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.refusals[0] += 1
            raise KubeError(0, "Unreachable", f"{type(error).__name__}: {error}") from error
        response: aiohttp.ClientResponse = getattr(answer, "response", answer)
        return response

    def _refused(self, response: aiohttp.ClientResponse, data: bytes) -> KubeError:
        if response.status != HTTPStatus.NOT_FOUND:
            # That something is not there is an answer like another.
            self.refusals[response.status] += 1
        return _refusal(response.status, data, retry_after_s=_seconds(response.headers.get("Retry-After", "")))


async def cluster_configuration(kubeconfig: str | None = None) -> Configuration:
    """Where the API server is and who we are: by the pod's service account where there is one, else by a kubeconfig.

    It reads a service account's token again every minute. Raises KubeError where there is neither.
    """
    configuration = Configuration()
    # Each pool's watch holds a connection for as long as the pool is there.
    configuration.connection_pool_maxsize = 0
    # Python 3.13 asks by default for extensions that the authorities of many clusters do not have (key usage, key ids).
    configuration.disable_strict_ssl_verification = True
    try:
        if kubeconfig is not None:
            await kube_config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        elif "KUBERNETES_SERVICE_HOST" in os.environ:
            kube_config.load_incluster_config(client_configuration=configuration)
        else:
            await kube_config.load_kube_config(client_configuration=configuration)
    except kube_config.ConfigException as error:
        raise KubeError(0, "NoCredentials", str(error)) from error
    return configuration


def _refusal(status: int, data: bytes | Mapping[str, Any], *, retry_after_s: float = 0.0) -> KubeError:
    """From the API's Status object, or from whatever a proxy in between has said."""
    try:
        answer = json.loads(data) if isinstance(data, bytes) else data
        reason, message = str(answer["reason"]), str(answer.get("message", ""))
        wait_s = (answer.get("details") or {}).get("retryAfterSeconds", 0)
        return KubeError(status, reason, message, retry_after_s=max(retry_after_s, float(wait_s)))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = data[:200].decode("utf-8", "replace") if isinstance(data, bytes) else str(data)[:200]
        return KubeError(status, _PHRASES.get(status, "Error"), text, retry_after_s=retry_after_s)


def _seconds(text: str) -> float:
    """Of a Retry-After header, which is a date too in theory, though never here."""
    return float(text) if text.isascii() and text.isdecimal() else 0.0
