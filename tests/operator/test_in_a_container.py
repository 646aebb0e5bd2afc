"""What is otherwise in a container than on the machine of who writes it."""

import asyncio
import contextlib
import getpass
import ssl
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient

from trimtab_operator.kopf_feed import KopfFeed, Watched
from trimtab_operator.kube import SERVICES, Object, Resource, cluster_configuration

CONFIG = """\
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "https://127.0.0.1:6443"}}]
users: [{name: u, user: {token: t}}]
"""


async def test_authorities_without_the_extensions_of_strict_ones_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ssl.create_default_context

    def as_in_python_3_13(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        context = usual(*args, **kwargs)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_in_python_3_13)
    (tmp_path / "kubeconfig").write_text(CONFIG)
    client = ApiClient(await cluster_configuration(str(tmp_path / "kubeconfig")))
    flags = client.rest_client.ssl_context.verify_flags
    await client.close()
    assert not flags & ssl.VERIFY_X509_STRICT


async def test_the_user_needs_no_name(kube_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name() -> str:
        raise OSError("No username set in the environment")

    monkeypatch.setattr(getpass, "getuser", no_name)
    is_listed = asyncio.Event()

    class Sink:
        def changed(self, resource: Resource, event: str | None, body: Object) -> None: ...

        def listed(self, resource: Resource) -> None:
            is_listed.set()

        def watched(self, resource: Resource) -> None: ...

    feed = asyncio.create_task(KopfFeed([Watched(SERVICES)], Sink(), kubeconfig=str(kube_config)).run(["default"]))
    listed = asyncio.create_task(is_listed.wait())
    await asyncio.wait({feed, listed}, return_when=asyncio.FIRST_COMPLETED)
    assert is_listed.is_set()
    for task in (feed, listed):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
