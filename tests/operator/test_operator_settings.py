"""Flags, the install's secret, health: what an operator is told and tells of itself."""

import base64
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from trimtab_operator.health import STUCK_S, Health
from trimtab_operator.install_secret import InstallSecretError, install_secret
from trimtab_operator.kube import SECRETS, Kube
from trimtab_operator.settings import SettingsError, parse_settings

GIVEN = {"TRIMTAB_STORE": "redis://store:6379", "POD_NAMESPACE": "trimtab-system", "POD_NAME": "operator-1"}


def test_a_bare_command_in_a_pod_is_enough() -> None:
    settings = parse_settings([], GIVEN)
    assert (settings.command, settings.namespace, settings.store_url) == (
        "run", "trimtab-system", "redis://store:6379",
    )  # fmt: skip
    assert settings.namespaces == ()
    assert settings.elects_leader
    assert settings.identity == "operator-1"


def test_flags_win_over_the_environment_and_namespaces_fold_together() -> None:
    words = ["--store", "unix:///s", "--namespace", "a", "--namespace", "b", "--namespace", "a", "--no-leader-election"]
    settings = parse_settings(words, GIVEN)
    assert (settings.store_url, settings.namespaces, settings.elects_leader) == ("unix:///s", ("a", "b"), False)


def test_a_webhook_needs_no_store() -> None:
    assert parse_settings(["webhook"], {"POD_NAMESPACE": "x"}).store_url == ""


@pytest.mark.parametrize(
    ("words", "environment", "text"),
    [
        ([], {"POD_NAMESPACE": "x"}, "TRIMTAB_STORE"),
        (["--store", "http://store"], {"POD_NAMESPACE": "x"}, "TRIMTAB_STORE"),
        (["--metrics-port", "70000"], GIVEN, "65535"),
        (["--namespace", "No_Name"], GIVEN, "No_Name"),
        (["--image-pull-policy", "Sometimes"], GIVEN, "Sometimes"),
        (["walk"], GIVEN, "walk"),
        (["--names=a"], GIVEN, "--names"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(words: list[str], environment: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        parse_settings(words, environment)


@pytest.mark.skipif(Path("/var/run/secrets/kubernetes.io").exists(), reason="this is a pod")
def test_a_namespace_of_its_own_is_needed() -> None:
    with pytest.raises(SettingsError, match="POD_NAMESPACE"):
        parse_settings([], {"TRIMTAB_STORE": "redis://store"})


async def test_the_installs_secret_is_made_once_and_then_read(kube: Kube, namespace: str) -> None:
    first = await install_secret(kube, namespace=namespace, name="trimtab-install")
    assert len(first) >= 32
    assert await install_secret(kube, namespace=namespace, name="trimtab-install") == first


async def test_a_secret_that_somebody_gave_is_taken_and_an_empty_one_refused(kube: Kube, namespace: str) -> None:
    for name, value in (("given", b"sixteen bytes, or more"), ("empty", b"")):
        data = {"secret": base64.b64encode(value).decode()}
        about = {"name": name, "namespace": namespace}
        await kube.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": about, "data": data})
    assert await install_secret(kube, namespace=namespace, name="given") == b"sixteen bytes, or more"
    with pytest.raises(InstallSecretError, match="16 bytes"):
        await install_secret(kube, namespace=namespace, name="empty")


async def test_health_tells_of_work_that_stands_still_and_of_what_is_waited_for() -> None:
    age_s, reason = 0.0, "the first lists"
    health = Health(age_s=lambda: age_s, waits_for=lambda: reason, registry=CollectorRegistry())
    async with health.served("127.0.0.1", 0) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

        async def status(path: str) -> int:
            async with session.get(path) as response:
                return response.status

        assert (await status("/healthz"), await status("/readyz"), await status("/metrics")) == (200, 503, 200)
        reason = ""
        assert await status("/readyz") == 200
        age_s = STUCK_S + 1
        assert await status("/healthz") == 503
