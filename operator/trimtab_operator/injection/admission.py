"""An AdmissionReview answered: which sidecar a new pod gets, if any.

The one rule: every answer allows the pod. What is not understood, not known or goes wrong leaves it as it is, but for
a note of the reason, and is counted. Nothing here waits for anybody.
"""

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.names import store_secret_name
from trimtab_operator.injection.advice import WARNING_CHARS_MAX
from trimtab_operator.injection.marks import DISABLED, INJECT
from trimtab_operator.injection.outcome import SPOKEN, Injection, Skip
from trimtab_operator.injection.pod_bounds import PATCH_BYTES_MAX, REVIEW_BYTES_MAX
from trimtab_operator.injection.pod_injection import inject, left_alone
from trimtab_operator.injection.pool_book import PoolBook
from trimtab_operator.install import Install
from trimtab_operator.kube import Object

logger = logging.getLogger(__name__)

Outcome = Literal["injected", "unchanged", "skipped", "error"]
PROTECTED: Final = frozenset({"kube-system"})
"""Namespaces that are never injected into, whatever their labels; the operator's own is another."""
API_VERSION: Final = "admission.k8s.io/v1"


class NotAReviewError(ValueError):
    """The body is no AdmissionReview, so there is nobody to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`body` is the AdmissionReview to send; the rest is for counting."""

    body: Object
    outcome: Outcome
    reason: str = ""
    """Why it was skipped."""
    pool: PoolKey | None = None
    pod: str = ""
    """`namespace/name`, as far as it has a name yet."""
    warnings: tuple[str, ...] = field(default=())


class Admission:
    """Answers from what `book` knows at that moment."""

    def __init__(self, book: PoolBook, install: Install) -> None:
        self.has_native = True
        """The cluster knows init containers that restart."""
        self._book = book
        self._install = install

    def answer(self, data: bytes) -> Answer:
        """Raises NotAReviewError; nothing else."""
        try:
            request = json.loads(data)["request"]
            uid = request["uid"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise NotAReviewError(type(error).__name__) from error
        try:
            return replace(self._decide(str(uid), request, len(data)), pod=_name(request))
        except Exception:
            logger.exception("a pod was left as it is")
            return Answer(body=_review(str(uid)), outcome="error")

    def _decide(self, uid: str, request: Mapping[str, Any], size_bytes: int) -> Answer:
        pod = request["object"]
        # Pods of controllers have neither name nor namespace yet.
        namespace = str(request["namespace"])
        labels = pod["metadata"].get("labels") or {}
        if request.get("kind", {}).get("kind") != "Pod" or request.get("operation") != "CREATE":
            return _skipped(uid, Skip("no_pool", "not a pod that is created"), None)
        if namespace in PROTECTED or namespace == self._install.namespace:
            return _skipped(uid, Skip("protected_namespace", f"never in {namespace}"), None)
        if labels.get(INJECT) == DISABLED:
            return _skipped(uid, Skip("opted_out", f"the pod's label {INJECT} is {DISABLED}"), None)
        match = self._book.match(namespace, labels)
        if isinstance(match, Skip):
            return _skipped(uid, match, None)
        key = match.pool.key
        if size_bytes > REVIEW_BYTES_MAX:
            text = f"the pod has {size_bytes} bytes, more than the {REVIEW_BYTES_MAX} that are looked at"
            return _skipped(uid, Skip("too_large", text), key)
        secret_name = store_secret_name(key.name)
        result = inject(pod, match.pool, match.spec, self._install, secret_name, has_native=self.has_native)
        if isinstance(result, Skip):
            return _skipped(uid, result, key, left_alone(pod, result))
        patch = json.dumps(result.patch, separators=(",", ":")).encode()
        if len(patch) > PATCH_BYTES_MAX:
            return _skipped(uid, Skip("too_large", f"the sidecar would add {len(patch)} bytes to the pod"), key)
        return _injected(uid, result, patch, key)


def _name(request: Mapping[str, Any]) -> str:
    metadata = request["object"]["metadata"]
    return f"{request['namespace']}/{metadata.get('name') or metadata.get('generateName') or ''}"


def _injected(uid: str, injection: Injection, patch: bytes, pool: PoolKey) -> Answer:
    body = _review(uid, injection.warnings)
    if injection.patch:
        body["response"] |= _patching(patch)
        # Shown in audit logs, under the webhook's name.
        body["response"]["auditAnnotations"] = {"pool": str(pool)}
    outcome: Outcome = "injected" if injection.patch else "unchanged"
    return Answer(body=body, outcome=outcome, pool=pool, warnings=injection.warnings)


def _skipped(uid: str, skip: Skip, pool: PoolKey | None, note: Sequence[Object] = ()) -> Answer:
    warnings = (f"trimtab: no sidecar injected: {skip.text}"[:WARNING_CHARS_MAX],) if skip.reason in SPOKEN else ()
    body = _review(uid, warnings)
    if note:
        body["response"] |= _patching(json.dumps(note, separators=(",", ":")).encode())
    return Answer(body=body, outcome="skipped", reason=skip.reason, pool=pool, warnings=warnings)


def _patching(patch: bytes) -> Object:
    return {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}


def _review(uid: str, warnings: tuple[str, ...] = ()) -> Object:
    response: Object = {"uid": uid, "allowed": True}
    if warnings:
        response["warnings"] = list(warnings)
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
