"""Where the running Envoy sends a request: to the picker's choice, never to the client's."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from envoy_rig import Rig

from trimtab.probes import free_ports
from trimtab_operator.envoy.front import DnsHosts

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stack]


@pytest.mark.parametrize("name", ["a", "b", "c"])
async def test_a_request_goes_where_the_picker_says(rig: Rig, name: str) -> None:
    for _ in range(4):
        status, body, headers = await rig.ask(x_test_destination=rig.engines[name])
        assert (status, body["engine"]) == (200, name)
        assert headers["x-trimtab-endpoint"] == rig.engines[name]


async def test_a_picker_that_sets_the_header_only_is_followed_too(rig: Rig) -> None:
    rig = replace(rig, is_announced=False)  # of a request that is shown whole there are no headers to be set
    for _ in range(4):
        _, body, _ = await rig.ask(x_test_destination_header=rig.engines["b"])
        assert body["engine"] == "b"


async def test_without_a_choice_engines_are_used_in_turn(rig: Rig) -> None:
    served = Counter([(await rig.ask())[1]["engine"] for _ in range(30)])
    assert set(served) == {"a", "b", "c"}
    assert max(served.values()) - min(served.values()) <= 2  # two workers count for themselves


async def test_the_clients_own_choice_is_removed_at_the_door(rig: Rig) -> None:
    own = {
        "x_gateway_destination_endpoint": rig.engines["a"],
        "x_gateway_destination_endpoint_subset": rig.engines["a"],
    }
    served = Counter()
    for _ in range(12):
        _, body, _ = await rig.ask(**own)
        served[body["engine"]] += 1
        assert body["headers"].get("x-test-seen", "") == ""
        assert not [key for key in body["headers"] if key.lower().startswith("x-gateway-destination-endpoint")]
    assert set(served) == {"a", "b", "c"}


async def test_the_pickers_choice_wins_over_the_clients(rig: Rig) -> None:
    _, body, _ = await rig.ask(x_gateway_destination_endpoint=rig.engines["a"], x_test_destination=rig.engines["c"])
    assert body["engine"] == "c"


async def test_an_endpoint_outside_the_pool_is_not_reached(rig: Rig) -> None:
    outside = f"127.0.0.1:{rig.admin.rpartition(':')[2]}"
    status, body, _ = await rig.ask(x_test_destination=outside)
    assert status == 200
    assert body["engine"] in rig.engines


async def test_an_unknown_endpoint_is_skipped_for_the_next_of_the_list(rig: Rig) -> None:
    _, body, _ = await rig.ask(x_test_destination=f"127.0.0.1:1,{rig.engines['b']}")
    assert body["engine"] == "b"


@pytest.mark.parametrize("trouble", ["x_test_refuse", "x_test_reset"])
async def test_an_engine_that_fails_before_answering_is_followed_by_the_next_of_the_list(
    rig: Rig, trouble: str
) -> None:
    wish = f"{rig.engines['b']},{rig.engines['c']},{rig.engines['a']}"
    status, body, headers = await rig.ask(body=b"x" * 300_000, x_test_destination=wish, **{trouble: "b,c"})
    assert (status, body["engine"], body["body_bytes"]) == (200, "a", 300_000)
    # The picker is told where the request really went, so that its reservation can move there.
    assert headers["x-test-upstream"] == rig.engines["a"]
    assert headers["x-test-served"] == rig.engines["a"]
    assert headers["x-test-attempts"] == "3"


async def test_a_list_that_is_used_up_ends_in_the_fallback_and_not_on_the_same_engine(rig: Rig) -> None:
    for _ in range(6):
        status, body, _ = await rig.ask(x_test_destination=rig.engines["b"], x_test_refuse="b")
        assert status == 200
        assert body["engine"] in ("a", "c")


async def test_a_dead_engine_is_followed_by_the_next_of_the_list(rig: Rig) -> None:
    await rig.supervisor.stop("b")
    try:
        wish = f"{rig.engines['b']},{rig.engines['c']}"
        for _ in range(4):
            status, body, headers = await rig.ask(x_test_destination=wish)
            assert (status, body["engine"]) == (200, "c")
            assert headers["x-test-upstream"] == rig.engines["c"]
        for _ in range(9):
            status, body, _ = await rig.ask()
            assert status == 200
    finally:
        await rig.supervisor.restart("b")


async def test_when_every_engine_refuses_the_client_sees_it(rig: Rig) -> None:
    status, body, headers = await rig.ask(x_test_refuse="a,b,c")
    assert (status, body["refused"]) == (503, True)
    assert headers["x-test-code"] == "503"


async def test_both_pickers_get_about_half_of_the_requests(rig: Rig) -> None:
    asked = Counter([(await rig.ask())[1]["headers"]["x-test-picker"] for _ in range(40)])
    assert 15 <= asked["picker-1"] <= 25
    assert sum(asked.values()) == 40


async def test_a_body_above_the_limit_is_refused_and_one_just_below_passes(rig: Rig) -> None:
    limit = 8 << 20
    status, body, _ = await rig.ask(body=b"x" * (limit - 1024), x_test_destination=rig.engines["a"])
    assert (status, body["body_bytes"]) == (200, limit - 1024)
    status, _, _ = await rig.ask(body=b"x" * (limit + 1024), x_test_destination=rig.engines["a"])
    assert status == 413


async def test_a_request_without_a_body_is_routed_too(rig: Rig) -> None:
    headers = {"x-test-destination": rig.engines["c"]}
    async with rig.session.get(f"{rig.url}/v1/models", headers=headers) as response:
        assert (await response.json())["engine"] == "c"


async def test_plain_round_robin_has_no_picker_and_still_removes_the_clients_choice(rig: Rig) -> None:
    plain = await rig.start_envoy("plain", plain=True)
    served = Counter()
    for _ in range(12):
        _, body, headers = await plain.ask(x_gateway_destination_endpoint=rig.engines["a"])
        assert "x-test-picker" not in body["headers"]
        assert headers["x-trimtab-endpoint"] == rig.engines[body["engine"]]
        served[body["engine"]] += 1
    assert set(served) == {"a", "b", "c"}


async def test_a_pool_behind_a_dns_name_has_every_port_as_a_host(rig: Rig) -> None:
    ports = tuple(int(address.rpartition(":")[2]) for address in rig.engines.values())
    through = await rig.start_envoy("dns", pool=DnsHosts(name="localhost", ports=ports))
    for name, address in rig.engines.items():
        for _ in range(3):
            _, body, _ = await through.ask(x_test_destination=address)
            assert body["engine"] == name


async def test_the_stats_listener_shows_two_pages_and_no_more(rig: Rig) -> None:
    [port] = free_ports(1)
    await rig.start_envoy("stats", stats_port=port)
    statuses = {}
    for page in ("ready", "stats/prometheus", "config_dump", "quitquitquit"):
        async with rig.session.get(f"http://127.0.0.1:{port}/{page}") as response:
            statuses[page] = response.status
    assert statuses == {"ready": 200, "stats/prometheus": 200, "config_dump": 404, "quitquitquit": 404}


async def test_the_access_log_names_the_endpoint_and_nothing_of_the_prompt(rig: Rig) -> None:
    logging = await rig.start_envoy("logging", access_log=True)
    await logging.ask(body=b'{"prompt": "very secret"}', x_test_destination=rig.engines["b"])
    await rig.supervisor.stop("logging")  # flushes
    text = rig.supervisor.log_path("logging").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert lines[-1]["endpoint"] == rig.engines["b"]
    assert lines[-1]["status"] == 200
    assert "secret" not in text


async def test_a_client_names_no_rank_even_where_no_picker_chose(rig: Rig) -> None:
    _, body, _ = await rig.ask(x_data_parallel_rank="3")
    assert "x-data-parallel-rank" not in {name.lower() for name in body["headers"]}
