"""What the sidecar's container is in pods of many shapes."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from injection_pods import (
    CACHE,
    CACHE_MOUNT,
    EVENTS,
    GUARANTEED,
    INSTALL,
    MODELS,
    MODELS_MOUNT,
    SHAPES,
    engine,
    env_of,
    injected,
    injection,
    patched,
    pod,
    policy,
    pool,
    sidecar_of,
    skipped,
    words_of,
)

from trimtab_operator.injection.marks import ACCESS_PATH, DIGEST_NOTE, INJECTED, STATE_PATH
from trimtab_operator.injection.outcome import Injection, Skip
from trimtab_operator.injection.pod_injection import inject
from trimtab_operator.install import Install
from trimtab_sidecar.settings import parse_settings

OURS = (STATE_PATH, ACCESS_PATH)
HOST = {"TRIMTAB_ENDPOINT_HOST": "10.0.0.1"}


@pytest.mark.parametrize("kind", ["Native", "Container"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_second_call_changes_nothing(shape: str, kind: str) -> None:
    once = injected(SHAPES[shape](), kind=kind)
    assert injection(once, kind=kind).patch == []


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_there_stays_as_it_was(shape: str) -> None:
    before = SHAPES[shape]()
    after = injected(before)
    assert after["spec"]["containers"] == before["spec"]["containers"]
    inits = before["spec"].get("initContainers", [])
    assert after["spec"]["initContainers"][: len(inits)] == inits
    volumes = before["spec"].get("volumes", [])
    assert after["spec"]["volumes"][: len(volumes)] == volumes
    assert after["metadata"]["labels"] == before["metadata"]["labels"] | {INJECTED: "true"}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sidecar_and_its_drain_take_their_flags(shape: str) -> None:
    container = sidecar_of(injected(SHAPES[shape]()))
    env = HOST | {name: value for name, value in env_of(container).items() if isinstance(value, str)}
    env["TRIMTAB_ENGINE_ARGS"] = env["TRIMTAB_ENGINE_ARGS"].replace("$$", "$")
    settings = parse_settings(container["args"], env)
    assert (settings.pool_namespace, settings.pool_name, settings.endpoint_host) == ("ns", "chat", "10.0.0.1")
    assert str(settings.checkpoint_dir) == STATE_PATH
    assert settings.access_folder is not None
    assert str(settings.access_folder.folder) == ACCESS_PATH
    program, drain, *flags = container["lifecycle"]["preStop"]["exec"]["command"]
    assert ([program], drain) == (container["command"], "drain")
    assert parse_settings(flags, env) == settings


def test_a_native_sidecar_comes_last_among_the_init_containers_and_never_holds_the_pod_back() -> None:
    after = injected(SHAPES["init containers and a mesh"]())
    last = after["spec"]["initContainers"][-1]
    assert (last["name"], last["restartPolicy"]) == ("trimtab-sidecar", "Always")
    assert "livenessProbe" in last
    assert not {"startupProbe", "readinessProbe"} & set(last)
    # A Secret that is missing would keep the container, and so the pod, from starting.
    assert {"name": "trimtab-access", "mountPath": ACCESS_PATH, "readOnly": True} in last["volumeMounts"]
    secret = {"secretName": "trimtab-chat-store", "optional": True}
    assert {"name": "trimtab-access", "secret": secret} in after["spec"]["volumes"]
    assert not [entry for entry in last["env"] if "secretKeyRef" in entry.get("valueFrom", {})]


def test_an_ordinary_container_has_no_restart_policy() -> None:
    after = injected(SHAPES["vLLM from a hub"](), kind="Container")
    assert "initContainers" not in after["spec"]
    assert "restartPolicy" not in sidecar_of(after)


def test_the_policy_that_changes_its_kind_moves_the_container() -> None:
    after = injected(injected(SHAPES["Guaranteed"]()), kind="Container")
    assert after["spec"]["initContainers"] == []
    assert [c["name"] for c in after["spec"]["containers"]] == ["vllm", "trimtab-sidecar"]


def test_a_restart_policy_that_another_webhook_dropped_comes_back() -> None:
    once = injected(SHAPES["vLLM from a hub"]())
    broken = copy.deepcopy(once)
    del broken["spec"]["initContainers"][-1]["restartPolicy"]
    assert injected(broken) == once
    broken["spec"]["initContainers"][-1]["restartPolicy"] = "OnFailure"
    assert injected(broken) == once


def test_what_another_webhook_took_away_comes_back_and_what_it_added_stays() -> None:
    once = injected(SHAPES["vLLM from a hub"]())
    broken = copy.deepcopy(once)
    container = broken["spec"]["initContainers"][-1]
    container["env"] = [entry for entry in container["env"] if entry["name"] != "TRIMTAB_ENGINE_ARGS"]
    container["env"].append({"name": "OTEL_SERVICE_NAME", "value": "x"})
    container["image"] = "mirror.example/sidecar:1"
    container["resources"] = {"limits": {"memory": "1Gi"}}
    broken["spec"]["volumes"] = [v for v in broken["spec"]["volumes"] if v["name"] != "trimtab-sidecar"]
    mended = injected(broken)
    container = sidecar_of(mended)
    assert env_of(container) == env_of(sidecar_of(once)) | {"OTEL_SERVICE_NAME": "x"}
    assert container["image"] == "mirror.example/sidecar:1"
    assert container["resources"] == {"limits": {"memory": "1Gi"}}
    assert {v["name"] for v in mended["spec"]["volumes"]} == {
        "cache",
        "trimtab-sidecar",
        "trimtab-home",
        "trimtab-access",
    }
    assert injection(mended).patch == []


def test_a_container_that_another_webhook_removed_comes_back() -> None:
    once = injected(SHAPES["Guaranteed"]())
    broken = copy.deepcopy(once)
    broken["spec"]["initContainers"] = []
    assert injected(broken) == once


def test_an_engine_that_another_webhook_changed_is_told_anew() -> None:
    once = injected(SHAPES["vLLM from a hub"]())
    changed = copy.deepcopy(once)
    changed["spec"]["containers"][0]["args"][1] = "Qwen/Qwen3-32B"
    sidecar = changed["spec"]["initContainers"][-1]
    sidecar["image"] = "mirror.example/sidecar:1"
    after = sidecar_of(injected(changed))
    assert words_of(after)[1] == "Qwen/Qwen3-32B"
    assert after["image"] == "mirror.example/sidecar:1"


def test_the_first_fields_of_their_kind_are_made_and_none_is_lost() -> None:
    before = pod(engine("--model", "m"))
    before["metadata"]["annotations"] = {}
    after = injected(before)
    assert set(after["metadata"]["annotations"]) >= {DIGEST_NOTE}
    noted = injected(SHAPES["annotations of the autoscaler"]())["metadata"]["annotations"]
    assert noted["a/b"] == "c"
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    assert noted[key] == "scratch,trimtab-sidecar"


def test_pull_secrets_of_the_install_are_added_to_the_pods_own() -> None:
    install = Install(
        namespace="s", store_url="", secret=b"", picker_image="", sidecar_image="i", envoy_image="",
        image_pull_secrets=("ours", "theirs"),
    )  # fmt: skip
    before = pod(engine("--model", "m"), imagePullSecrets=[{"name": "theirs"}])
    added = [o["value"] for o in injection(before, install=install).patch if "imagePullSecrets" in o["path"]]
    assert added == [{"name": "ours"}]


# The engine's container.


def test_the_policy_names_the_engines_container() -> None:
    before = pod(engine("--model", "a", name="one"), engine("--model", "b", name="two", port=None))
    assert words_of(sidecar_of(injected(before, engineContainer="two")))[1] == "b"
    skip = skipped(before, engineContainer="three")
    assert skip.reason == "no_engine"
    assert "spec.sidecar.engineContainer" in skip.text
    assert "one, two" in skip.text


def test_the_container_with_the_target_port_is_the_engine() -> None:
    before = pod(engine("--model", "a", name="one", port=8001), engine("--model", "b", name="two", port=8000))
    assert words_of(sidecar_of(injected(before)))[1] == "b"


def test_a_proxy_with_the_target_port_is_not_taken_for_the_engine() -> None:
    container = sidecar_of(injected(SHAPES["a proxy, and metrics on our port"]()))
    assert words_of(container)[:4] == ["vllm", "serve", "--model", "m"]
    assert "--engine-url=http://127.0.0.1:8000" in container["args"]


def test_without_ports_the_one_that_looks_like_an_engine_is_it() -> None:
    other = {"name": "helper", "image": "helper:1", "args": ["--upstream=http://vllm:8000"]}
    before = pod(other, engine("--model", "a", port=None))
    assert words_of(sidecar_of(injected(before)))[1] == "a"


def test_two_that_may_be_it_are_none_and_the_reason_names_the_field() -> None:
    before = pod(engine("--model", "a", name="one", port=None), engine("--model", "b", name="two", port=None))
    skip = skipped(before)
    assert (skip.reason, "spec.sidecar.engineContainer" in skip.text) == ("no_engine", True)


@pytest.mark.parametrize(
    ("container", "kind"),
    [
        ({"image": "vllm/vllm-openai:v1", "args": ["--model", "m"]}, "vllm"),
        ({"image": "lmsysorg/sglang:v1"}, "sglang"),
        ({"image": "x", "command": ["python3", "-m", "sglang.launch_server"]}, "sglang"),
        ({"image": "x", "command": ["sh", "-c", "exec sglang serve --model-path m"]}, "sglang"),
        ({"image": "sglang/vllm-compat:1", "command": ["/usr/bin/vllm", "serve", "m"]}, "vllm"),
        ({"image": "registry.example/llm:1"}, "vllm"),
    ],
)
def test_the_engine_is_told_by_what_runs(container: dict[str, Any], kind: str) -> None:
    args = sidecar_of(injected(pod({"name": "e", **container})))["args"]
    assert f"--engine={kind}" in args


def test_the_policy_says_which_engine_it_is() -> None:
    assert "--engine=sglang" in sidecar_of(injected(SHAPES["vLLM from a hub"](), engine="sglang"))["args"]


def test_the_pod_says_which_engine_it_is_where_its_command_does_not() -> None:
    before = pod({"name": "e", "image": "registry.example/llm:1"})
    before["metadata"]["labels"]["trimtab.dev/engine"] = "sglang"
    assert "--engine=sglang" in sidecar_of(injected(before))["args"]
    assert "--engine=vllm" in sidecar_of(injected(before, engine="vllm"))["args"]
    before["metadata"]["labels"]["trimtab.dev/engine"] = "another"
    assert "--engine=vllm" in sidecar_of(injected(before))["args"]


def test_windows_pods_and_pods_with_a_sidecar_of_their_own_are_left_alone() -> None:
    assert skipped(pod(engine("--model", "m"), os={"name": "windows"})).reason == "windows"
    own = pod(engine("--model", "m"), {"name": "trimtab-sidecar", "image": "x"})
    assert skipped(own).reason == "own_sidecar"


# Its command line.


def test_the_argument_of_vllms_own_image_is_the_model() -> None:
    assert words_of(sidecar_of(injected(SHAPES["vLLM whose first argument is the model"]()))) == [
        "vllm",
        "serve",
        "/models/qwen",
    ]


def test_references_are_expanded_here_or_passed_on_to_be() -> None:
    container = sidecar_of(injected(SHAPES["references of every kind"]()))
    env = env_of(container)
    # The kubelet makes this of `$$`.
    words = json.loads(env["TRIMTAB_ENGINE_ARGS"].replace("$$", "$"))
    assert words == [
        "--model=/models/$(MODEL)",
        "--api-key=$(KEY)",
        "--host=$(POD_IP)",
        '--served-model-name=a $(b) "c"',
    ]
    assert env["MODEL"] == {"configMapKeyRef": {"name": "m", "key": "m", "optional": True}}
    assert env["TRIMTAB_ENGINE_API_KEY"] == "$(KEY)"
    assert "--engine-url=http://$(POD_IP):8000" in container["args"]
    names = [entry["name"] for entry in container["env"]]
    assert names.index("KEY") < names.index("TRIMTAB_ENGINE_API_KEY")
    assert "ROOT" not in names
    mount = next(m for m in container["volumeMounts"] if m["name"] == "models")
    assert (mount["subPathExpr"], "POD" in names) == ("$(POD)/x", True)


def test_a_value_that_refers_to_one_that_only_the_kubelet_knows_is_passed_on_with_it() -> None:
    env = [
        {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "B", "value": "/models/$(A)"},
        {"name": "C", "value": "$(LATER)"},
        {"name": "LATER", "value": "x"},
    ]
    container = sidecar_of(injected(pod(engine("--model=$(B)", "--x=$(C)", env=env))))
    assert words_of(container) == ["--model=$(B)", "--x=$(LATER)"]
    assert [entry["name"] for entry in container["env"]][:2] == ["A", "B"]


def test_a_shells_variables_are_put_into_its_script() -> None:
    container = sidecar_of(injected(SHAPES["a shell's script"]()))
    words = words_of(container)
    assert words[:2] == ["/bin/bash", "-c"]
    assert 'exec vllm serve "/models/qwen"    --served-model-name $(NAME)' in words[2]
    assert env_of(container)["NAME"] == {"configMapKeyRef": {"name": "names", "key": "served", "optional": True}}


def test_whole_secrets_are_passed_on_without_what_would_break_the_sidecar() -> None:
    container = sidecar_of(injected(SHAPES["variables from a whole Secret"]()))
    assert container["envFrom"] == [{"secretRef": {"name": "s", "optional": True}}]
    assert env_of(container)["PYTHONPATH"] == ""
    assert "HF_HOME" not in env_of(container)
    assert {"name": "cache", "mountPath": "/root/.cache/huggingface", "readOnly": True} in container["volumeMounts"]


def test_each_target_port_is_an_engine() -> None:
    container = sidecar_of(injected(SHAPES["eight ports"](), *range(8000, 8008)))
    urls = [flag for flag in container["args"] if flag.startswith("--engine-url=")]
    assert urls == [f"--engine-url=http://127.0.0.1:{port}" for port in range(8000, 8008)]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3"),
        ("fd00::1", "[fd00::1]"),
        ("localhost", "127.0.0.1"),
    ],
)
def test_the_engine_is_reached_where_it_listens(host: str, url: str) -> None:
    args = sidecar_of(injected(pod(engine("--model", "m", "--host", host))))["args"]
    assert f"--engine-url=http://{url}:8000" in args


def test_the_api_key_comes_from_the_engines_flag_or_environment() -> None:
    by_flag = env_of(sidecar_of(injected(pod(engine("--model", "m", "--api-key", "a$b")))))
    assert by_flag["TRIMTAB_ENGINE_API_KEY"] == "a$$b"
    key = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "k", "key": "k"}}}
    by_env = env_of(sidecar_of(injected(pod(engine("--model", "m", env=[key])))))
    assert by_env["VLLM_API_KEY"] == key["valueFrom"]


# Its files.


def mounts_of(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mount["mountPath"]: mount for mount in sidecar_of(injected(body))["volumeMounts"]}


def test_a_models_volume_is_mounted_at_the_same_path_read_only() -> None:
    mounts = mounts_of(SHAPES["SGLang"]())
    assert mounts["/models"] == {"name": "models", "mountPath": "/models", "subPath": "shared", "readOnly": True}
    assert set(mounts) == {*OURS, "/models"}


def test_only_the_volumes_that_paths_lie_on_are_mounted() -> None:
    mounts = [
        {"name": "a", "mountPath": "/data"},
        {"name": "b", "mountPath": "/data/models"},
        {"name": "c", "mountPath": "/data/models/qwen/tokenizer"},
        {"name": "d", "mountPath": "/data/models-of-others"},
        {"name": "e", "mountPath": "/templates"},
        {"name": "f", "mountPath": "/scratch"},
    ]
    args = ["--model", "/data/models/qwen", "--chat-template=/templates/chat.jinja"]
    assert set(mounts_of(pod(engine(*args, volumeMounts=mounts)))) == {
        *OURS,
        "/data/models",
        "/data/models/qwen/tokenizer",
        "/templates",
    }


def test_a_hub_cache_in_roots_home_can_be_looked_into() -> None:
    after = injected(SHAPES["vLLM from a hub"]())
    container = sidecar_of(after)
    assert env_of(container)["HF_HOME"] == "/root/.cache/huggingface"
    paths = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert paths["/root"] == {"name": "trimtab-home", "mountPath": "/root"}
    assert paths["/root/.cache/huggingface"]["readOnly"]
    assert {"name": "trimtab-home", "emptyDir": {}} in after["spec"]["volumes"]


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({"HF_HOME": "/cache"}, "/cache/hub"),
        ({"HF_HUB_CACHE": "/cache/h"}, "/cache/h"),
        ({"HUGGINGFACE_HUB_CACHE": "/cache/h"}, "/cache/h"),
        ({"TRANSFORMERS_CACHE": "/cache/t"}, "/cache/t"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/huggingface/hub"),
        ({"HOME": "/cache"}, "/cache/.cache/huggingface/hub"),
    ],
)
def test_the_sidecar_looks_for_the_cache_where_the_engine_has_it(env: dict[str, str], place: str) -> None:
    from trimtab_sidecar.model_files import _hub_cache

    entries = [{"name": name, "value": value} for name, value in env.items()]
    mount = {"name": "cache", "mountPath": "/cache"}
    container = sidecar_of(injected(pod(engine("--model", "a/b", env=entries, volumeMounts=[mount]))))
    assert {"name": "cache", "mountPath": "/cache", "readOnly": True} in container["volumeMounts"]
    told = {name: value for name, value in env_of(container).items() if isinstance(value, str)}
    assert str(_hub_cache(None, told)) == place


def test_settings_of_the_hub_go_along_and_secrets_as_references() -> None:
    env = [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        {"name": "HF_HUB_OFFLINE", "value": "1"},
        {"name": "VLLM_USE_MODELSCOPE", "value": "true"},
        {"name": "AWS_SECRET_ACCESS_KEY", "value": "never"},
    ]
    told = env_of(sidecar_of(injected(pod(engine("--model", "a/b", env=env)))))
    assert told["HF_TOKEN"] == env[0]["valueFrom"]
    assert (told["HF_HUB_OFFLINE"], told["VLLM_USE_MODELSCOPE"]) == ("1", "true")
    assert "AWS_SECRET_ACCESS_KEY" not in told


def test_where_the_path_is_not_known_all_volumes_that_may_hold_models_are_mounted() -> None:
    mounts = [MODELS_MOUNT, {"name": "shm", "mountPath": "/dev/shm"}, {"name": "t", "mountPath": "/tmp"}]
    env = [{"name": "MODEL", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "m"}}}]
    assert set(mounts_of(pod(engine("--model=$(MODEL)", env=env, volumeMounts=mounts)))) == {*OURS, "/models"}
    assert set(mounts_of(pod({"name": "e", "image": "vllm", "volumeMounts": mounts}))) == {*OURS, "/models"}


# Security, amounts, ports.


def test_the_sidecar_has_no_rights_at_all() -> None:
    security = sidecar_of(injected(SHAPES["vLLM from a hub"]()))["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsGroup": 65532,
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_it_runs_as_the_engines_user_unless_that_is_root() -> None:
    security = sidecar_of(injected(SHAPES["another user than root"]()))["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (1000, 2000)
    security = sidecar_of(injected(SHAPES["root by name"]()))["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (65532, 65532)


@pytest.mark.parametrize(
    ("shape", "resources"),
    [
        ("vLLM from a hub", {"requests": {"cpu": "25m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}),
        ("Guaranteed", {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"cpu": "250m", "memory": "512Mi"}}),
        (
            "a limit of the processor everywhere",
            {"requests": {"cpu": "25m", "memory": "128Mi"}, "limits": {"cpu": "500m", "memory": "512Mi"}},
        ),
        ("amounts of the whole pod", None),
    ],
)
def test_the_pods_quality_of_service_stays(shape: str, resources: dict[str, Any] | None) -> None:
    assert sidecar_of(injected(SHAPES[shape]())).get("resources") == resources


def test_a_pod_with_an_init_container_without_limits_is_not_guaranteed() -> None:
    before = pod(engine("--model", "m", resources=GUARANTEED), initContainers=[{"name": "i", "image": "i"}])
    assert "cpu" not in sidecar_of(injected(before))["resources"]["limits"]


def test_the_policys_amounts_hold() -> None:
    asked = {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}
    assert sidecar_of(injected(pod(engine("--model", "m")), resources=asked))["resources"] == asked
    # A quota for limits of the processor would refuse the pod if one of its containers had none.
    limited = {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi", "cpu": "1"}}
    assert sidecar_of(injected(SHAPES["Guaranteed"](), resources=asked))["resources"] == limited


def test_amounts_beside_those_of_the_whole_pod_are_only_those_that_it_cannot_have() -> None:
    asked = {"limits": {"cpu": "9", "memory": "99Gi", "hugepages-2Mi": "2Mi", "a.example/nic": "1"}}
    found = sidecar_of(injected(SHAPES["amounts of the whole pod"](), resources=asked))["resources"]
    assert found == {"limits": {"a.example/nic": "1"}}


def test_the_metrics_port_makes_way() -> None:
    container = sidecar_of(injected(SHAPES["a proxy, and metrics on our port"](), 9092))
    assert "--metrics-port=9093" in container["args"]
    assert container["ports"] == [{"name": "trimtab-metrics", "containerPort": 9093, "protocol": "TCP"}]
    assert container["livenessProbe"]["httpGet"]["port"] == 9093


def test_on_the_nodes_network_no_port_is_claimed_and_pods_of_one_node_differ() -> None:
    first = sidecar_of(injected(SHAPES["the node's network"](), 8000))
    second = sidecar_of(injected(SHAPES["the node's network"](), 60000))
    assert "ports" not in first
    assert "--metrics-port=18000" in first["args"]
    assert "--metrics-port=50000" in second["args"]
    ports = [{"containerPort": number} for number in (55_535, 65_535, 1_024)]
    last = sidecar_of(injected(pod(engine("--model", "m", ports=ports), hostNetwork=True), 55_535))
    assert "--metrics-port=1025" in last["args"]


# What would have the pod refused, or keep it from starting.


def test_the_state_makes_way_for_the_engines_volumes() -> None:
    mounts = [{"name": "models", "mountPath": path} for path in ("/var/run/trimtab", "/trimtab-state/")]
    container = sidecar_of(injected(pod(engine(volumeMounts=mounts), volumes=[MODELS])))
    assert {"name": "trimtab-sidecar", "mountPath": "/trimtab-state-2"} in container["volumeMounts"]
    assert "--checkpoint-dir=/trimtab-state-2" in container["args"]
    assert container["lifecycle"]["preStop"]["exec"]["command"][2:] == container["args"]


@pytest.mark.parametrize("path", ["/", "/opt", "/usr/local", "/usr/lib/", "/etc", "/var/run", "/run", "/var", "opt"])
def test_a_volume_over_the_sidecars_own_program_is_not_mounted(path: str) -> None:
    body = pod(engine("--model", f"{path}/m", volumeMounts=[{"name": "models", "mountPath": path}]), volumes=[MODELS])
    assert path not in [mount["mountPath"] for mount in sidecar_of(injected(body))["volumeMounts"]]


def test_a_volume_in_which_another_is_mounted_is_as_it_is_for_the_engine() -> None:
    outer, inner = {"name": "cache", "mountPath": "/data/"}, {"name": "models", "mountPath": "/data/models"}
    volumes = [CACHE, MODELS]
    found = mounts_of(pod(engine("--model", "/data", volumeMounts=[outer, inner]), volumes=volumes))
    assert found["/data/"] == outer
    assert found["/data/models"] == {**inner, "readOnly": True}
    closed = {**outer, "readOnly": True}
    found = mounts_of(pod(engine("--model", "/data", volumeMounts=[closed, inner]), volumes=volumes))
    assert found["/data/"] == closed


def test_a_pod_whose_annotations_have_no_room_is_left_as_it_is() -> None:
    body = pod(engine("--model", "m"))
    body["metadata"]["annotations"] = {"a": "\u00e4" * ((128 << 10) - 50)}
    assert skipped(body).reason == "too_large"


@pytest.mark.parametrize(
    "body",
    [
        pod(engine(volumeMounts=[{"name": "m", "mountPath": f"/m{n}"} for n in range(1001)])),
        pod(engine(volumeMounts=[{"name": "m", "mountPath": f"/m{n}" + "/a" * 100} for n in range(400)])),
        pod(engine(ports=[{"containerPort": n + 1} for n in range(600)]), {"name": "b", "ports": [{}] * 401}),
        pod(engine(env=[{"name": f"E{n}"} for n in range(2001)])),
        pod(*({"name": f"c{n}"} for n in range(101))),
        pod(engine(*["x"] * 10_001)),
        pod(engine(), volumes=[{"name": f"v{n}"} for n in range(1001)]),
    ],
    ids=["mounts", "paths", "ports", "env", "containers", "args", "volumes"],
)
def test_of_a_pod_only_so_much_is_looked_at(body: dict[str, Any]) -> None:
    assert skipped(body).reason == "too_large"


def test_a_volume_of_our_name_that_is_no_empty_dir_is_not_used() -> None:
    body = pod(engine("--model", "m"), volumes=[{"name": "trimtab-sidecar", "secret": {"secretName": "s"}}])
    assert skipped(body).reason == "no_room"


def test_a_secret_of_our_name_that_is_another_one_is_not_used_and_that_of_another_pool_is_put_right() -> None:
    theirs = pod(engine("--model", "m"), volumes=[{"name": "trimtab-access", "secret": {"secretName": "theirs"}}])
    assert skipped(theirs).reason == "no_room"
    once = injected(pod(engine("--model", "m")))
    (volume,) = [v for v in once["spec"]["volumes"] if v["name"] == "trimtab-access"]
    volume["secret"]["defaultMode"] = 420
    assert injection(once).patch == []
    volume["secret"]["secretName"] = "trimtab-another-store"
    (volume,) = [v for v in injected(once)["spec"]["volumes"] if v["name"] == "trimtab-access"]
    assert volume["secret"] == {"secretName": "trimtab-chat-store", "optional": True}


def test_a_mirror_pod_is_left_alone() -> None:
    body = pod(engine("--model", "m"))
    body["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
    assert skipped(body).reason == "mirror_pod"


def test_a_port_and_a_volume_that_a_later_webhook_changed_leave_nothing_behind() -> None:
    once = injected(pod(engine("--model", "/models/m", volumeMounts=[MODELS_MOUNT]), volumes=[MODELS]))
    once["spec"]["containers"].append({"name": "late", "image": "x", "ports": [{"containerPort": 9091}]})
    once["spec"]["containers"][0]["volumeMounts"] = [{"name": "renamed", "mountPath": "/other"}]
    once["spec"]["containers"][0]["args"] = ["--model", "/other/m"]
    once["spec"]["volumes"] = [{"name": "renamed", "emptyDir": {}}]
    container = sidecar_of(injected(once))
    assert [port["containerPort"] for port in container["ports"]] == [9092]
    assert {mount["name"] for mount in container["volumeMounts"]} == {"trimtab-sidecar", "trimtab-access", "renamed"}


def test_a_cluster_without_init_containers_that_restart_gets_an_ordinary_one() -> None:
    body = pod(engine("--model", "m"))
    result = inject(body, pool(), policy(), INSTALL, "s", has_native=False)
    assert isinstance(result, Injection)
    after = patched(body, result.patch)
    assert "initContainers" not in after["spec"]
    assert "restartPolicy" not in sidecar_of(after)


def test_of_two_installations_the_first_keeps_the_pod() -> None:
    body = pod(engine("--model", "m"))
    other = dataclasses.replace(INSTALL, namespace="trimtab-blue", sidecar_image="registry.example/sidecar:2")
    once = injected(body)
    assert once["metadata"]["annotations"]["trimtab.dev/install"] == INSTALL.namespace
    second = inject(once, pool(), policy(), other, "s")
    assert isinstance(second, Skip)
    assert second.reason == "other_installation"
    assert injection(once).patch == []
    # A mark without a sidecar, as in a copied manifest, is nobody's.
    body["metadata"]["annotations"] = {"trimtab.dev/install": "long-gone"}
    assert injected(body)["metadata"]["annotations"]["trimtab.dev/install"] == INSTALL.namespace


# Warnings.


def warnings_of(body: dict[str, Any]) -> str:
    return "\n".join(injection(body).warnings)


def test_an_engine_without_events_is_told_the_flag_to_add() -> None:
    cache = {"volumeMounts": [CACHE_MOUNT]}
    vllm = warnings_of(pod(engine("--model", "m", **cache), volumes=[CACHE]))
    assert f"{EVENTS[0]} '{EVENTS[1]}'" in vllm
    sglang = warnings_of(
        pod(engine("--model-path", "/models/m", image="lmsysorg/sglang:1", volumeMounts=[MODELS_MOUNT]))
    )
    assert """--kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557",""" in sglang
    assert "--enable-metrics" in sglang
    off = ["--kv-events-config", '{"enable_kv_cache_events":false,"publisher":"zmq"}']
    assert "should be" in warnings_of(pod(engine("--model", "m", *off, **cache)))
    assert "replay_endpoint" in warnings_of(SHAPES["a shell's script"]())
    assert "--no-enable-prefix-caching" in warnings_of(
        pod(engine("--model", "m", "--no-enable-prefix-caching", **cache))
    )


def test_what_is_right_or_cannot_be_seen_is_not_warned_of() -> None:
    assert injection(SHAPES["vLLM from a hub"]()).warnings == ()
    config = pod(engine("--model", "/models/m", "--config", "/etc/vllm.yaml", volumeMounts=[MODELS_MOUNT]))
    assert injection(config).warnings == ()
    env = [{"name": "EVENTS", "valueFrom": {"configMapKeyRef": {"name": "e", "key": "e"}}}]
    reference = pod(
        engine("--model", "/models/m", "--kv-events-config=$(EVENTS)", env=env, volumeMounts=[MODELS_MOUNT])
    )
    assert injection(reference).warnings == ()


def test_the_demos_engines_are_not_warned_of() -> None:
    manifest = (Path(__file__).parents[2] / "manifests" / "demo.yaml").read_text()
    (template,) = [body["spec"]["template"] for body in yaml.safe_load_all(manifest) if body["kind"] == "Deployment"]
    assert any("emulator" in word for word in template["spec"]["containers"][0]["command"])
    assert injection(template).warnings == ()


def test_files_that_the_sidecar_will_not_see_are_named() -> None:
    assert "/root/.cache/huggingface is on no volume of container vllm" in warnings_of(
        pod(engine("--model", "a/b", *EVENTS))
    )
    template = pod(
        engine("--model", "/models/m", "--chat-template", "/vllm/t.jinja", *EVENTS, volumeMounts=[MODELS_MOUNT]),
        volumes=[MODELS],
    )
    assert "/vllm/t.jinja is on no volume" in warnings_of(template)
    assert "runs as root" in warnings_of(SHAPES["root by name"]())
    assert "neither command nor args" in warnings_of(SHAPES["only one container, of an image that says it all"]())


def test_the_image_is_the_policys_or_the_installs() -> None:
    assert sidecar_of(injected(SHAPES["Guaranteed"]()))["image"] == INSTALL.sidecar_image
    assert sidecar_of(injected(SHAPES["Guaranteed"](), image="x@sha256:1"))["image"] == "x@sha256:1"
