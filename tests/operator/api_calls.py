"""Calls of a real API server as they stand: status and answer, with strict validation, one connection."""

import http.client
import json
import ssl
import urllib.parse
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml


class ApiCalls:
    """As the administrator of a kubeconfig."""

    def __init__(self, kube_config: Path) -> None:
        config = yaml.safe_load(kube_config.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        context.check_hostname = False  # the certificate is for `kubernetes`, the address is loopback
        self._connection = http.client.HTTPSConnection(urllib.parse.urlsplit(cluster["server"]).netloc, context=context)
        self._headers = {"Authorization": f"Bearer {user['token']}", "Accept": "application/json"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()

    def call(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json", **query: str
    ) -> tuple[int, dict[str, Any]]:
        """(HTTP status, answer)."""
        headers = self._headers | {"Content-Type": content_type}
        data = None if body is None else json.dumps(body)
        self._connection.request(method, f"{path}?{urllib.parse.urlencode(query)}", data, headers)
        response = self._connection.getresponse()
        answer = response.read()
        # A path that is not served yet is answered in plain text.
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(answer) if is_json else {"message": answer.decode()}

    def apply(self, path: str, body: Any) -> dict[str, Any]:
        """Server-side apply, which must succeed."""
        status, answer = self.call(
            "PATCH", path, body, content_type="application/apply-patch+yaml", fieldManager="tests", force="true"
        )
        assert status in (200, 201), answer
        return answer

    def new_namespace(self, prefix: str) -> str:
        status, answer = self.call("POST", "/api/v1/namespaces", {"metadata": {"generateName": f"{prefix}-"}})
        assert status == 201, answer
        return str(answer["metadata"]["name"])

    def serve(self, crd: dict[str, Any]) -> None:
        """Applies a CRD and waits until its objects are served."""
        name, spec = crd["metadata"]["name"], crd["spec"]
        self.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}", crd)
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        # Not by the clock: each try asks the server, and the test's own timeout ends them.
        while self.call("GET", path, limit="1")[0] != 200:
            pass

    def dry_run(self, path: str, body: Any, method: str = "POST") -> tuple[int, dict[str, Any]]:
        """What the server would say, unknown fields included."""
        return self.call(method, path, body, dryRun="All", fieldValidation="Strict")
