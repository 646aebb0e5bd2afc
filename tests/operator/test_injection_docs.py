"""The container that the documentation gives for pods without injection is the one that injection makes."""

import copy
import json
import re
from pathlib import Path
from typing import Any, get_args

import yaml
from injection_pods import INSTALL, patched, policy, pool
from injection_webhook import kubectl

from trimtab_operator.injection.advice import EVENTS_CONFIG
from trimtab_operator.injection.outcome import Injection, SkipReason
from trimtab_operator.injection.pod_injection import inject
from trimtab_operator.kube import NAMESPACES, Kube, Object

PAGE = Path(__file__).parents[2] / "docs" / "injection.md"


def snippet() -> Object:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    body: Object = yaml.safe_load(text)
    return body


def by_name(container: Object) -> dict[str, Any]:
    """A container with its lists in no order, and words that are JSON compared as such."""
    result = copy.deepcopy(container)
    del result["image"], result["imagePullPolicy"]
    env = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in result["env"]}
    env["TRIMTAB_ENGINE_ARGS"] = json.loads(env["TRIMTAB_ENGINE_ARGS"])
    result["env"] = env
    result["volumeMounts"] = {mount["mountPath"]: mount for mount in result["volumeMounts"]}
    return result


def test_the_container_by_hand_is_the_one_that_is_injected() -> None:
    body = snippet()
    template = body["spec"]["template"]
    by_hand = template["spec"]["initContainers"].pop()
    plain = copy.deepcopy(template)
    plain["spec"]["volumes"] = [v for v in plain["spec"]["volumes"] if not v["name"].startswith("trimtab-")]
    plain["metadata"]["annotations"] = {}
    result = inject(plain, pool(namespace="models"), policy(), INSTALL, "trimtab-chat-store")
    assert isinstance(result, Injection)
    assert result.warnings == ()
    injected = patched(plain, result.patch)
    by_hand["imagePullPolicy"] = "any"
    assert by_name(by_hand) == by_name(injected["spec"]["initContainers"][-1])
    assert template["spec"]["volumes"] == injected["spec"]["volumes"]
    notes = template["metadata"]["annotations"]
    assert notes.items() <= injected["metadata"]["annotations"].items()


async def test_the_api_server_takes_the_snippet(kube_config: Path, kube: Kube) -> None:
    body = snippet()
    made = await kube.create(NAMESPACES, {"metadata": {"generateName": "models-"}})
    body["metadata"]["namespace"] = made["metadata"]["name"]
    words = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
    ran = await kubectl(kube_config, *words, text=json.dumps(body))
    assert ran.returncode == 0, ran.stdout
    assert "Warning" not in ran.stdout
    # Pods are judged more strictly than what makes them.
    pod = {"apiVersion": "v1", "kind": "Pod", **body["spec"]["template"]}
    pod["metadata"] = {**pod["metadata"], "name": "qwen", "namespace": body["metadata"]["namespace"]}
    ran = await kubectl(kube_config, *words, text=json.dumps(pod))
    assert ran.returncode == 0, ran.stdout


def test_the_flags_for_events_are_the_ones_that_the_webhook_asks_for() -> None:
    text = PAGE.read_text()
    assert all(f"--kv-events-config '{config}'" in text for config in EVENTS_CONFIG.values())


def test_the_page_names_every_reason() -> None:
    text = PAGE.read_text()
    assert [reason for reason in get_args(SkipReason) if f"`{reason}`" not in text] == []
