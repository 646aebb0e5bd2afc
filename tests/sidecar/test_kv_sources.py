"""Where events come from: what the engine says, what its flags say, and what is derived for each rank."""

import json

import pytest

from trimtab_sidecar.kv_sources import (
    KvSource,
    SourceError,
    configured_sources,
    discovered_sources,
    of_ranks,
    reachable,
)

CONFIG = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://127.0.0.1:5567",
    "topic": "kv@pod",
}


def test_what_the_engine_tells_of_each_rank_is_taken_as_it_is() -> None:
    answer = {"1": CONFIG | {"endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:5568"}, "0": CONFIG}
    assert discovered_sources(answer, "127.0.0.1") == (
        KvSource(rank=0, events="tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5567", topic="kv@pod"),
        KvSource(rank=1, events="tcp://127.0.0.1:5558", replay="tcp://127.0.0.1:5568", topic="kv@pod"),
    )


def test_an_engine_without_events_has_no_sources() -> None:
    assert discovered_sources({}, "127.0.0.1") == ()
    assert discovered_sources({"0": CONFIG | {"publisher": "null"}}, "127.0.0.1") == ()
    assert discovered_sources({"0": CONFIG | {"enable_kv_cache_events": False}}, "127.0.0.1") == ()


@pytest.mark.parametrize("answer", [None, [], {"x": {}}, {"0": 1}, {"0": CONFIG | {"endpoint": 5}}])
def test_an_answer_that_makes_no_sense_is_refused(answer: object) -> None:
    with pytest.raises(SourceError):
        discovered_sources(answer, "127.0.0.1")


def test_flags_give_a_source_for_each_rank() -> None:
    for args in (
        ["serve", "m", "--kv-events-config", json.dumps(CONFIG), "--data-parallel-size", "2"],
        ["serve", "m", f"--kv-events-config={json.dumps(CONFIG)}", "--data-parallel-size=2"],
        ["serve", "m", "--kv-events-config", json.dumps(CONFIG), "-dp", "2"],
    ):
        sources = configured_sources(args, "127.0.0.1")
        assert [(source.rank, source.events, source.replay) for source in sources] == [
            (0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5567"),
            (1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:5568"),
        ]


def test_flags_without_events_give_none() -> None:
    assert configured_sources(["serve", "m"], "127.0.0.1") == ()
    with pytest.raises(SourceError):
        configured_sources(["--kv-events-config", "{"], "127.0.0.1")


def test_an_engine_that_connects_makes_us_bind() -> None:
    (source,) = discovered_sources({"0": CONFIG | {"endpoint": "tcp://127.0.0.1:5557"}}, "127.0.0.1")
    assert source.binds_here
    (source,) = discovered_sources({"0": CONFIG}, "127.0.0.1")
    assert not source.binds_here
    (source,) = discovered_sources({"0": CONFIG | {"endpoint": "tcp://[::]:5557"}}, "127.0.0.1")
    assert not source.binds_here


@pytest.mark.parametrize(
    ("address", "host", "expected"),
    [
        ("tcp://*:1", "127.0.0.1", "tcp://127.0.0.1:1"),
        ("tcp://[::]:1", "::1", "tcp://[::1]:1"),
        ("tcp://*:1", "[::1]", "tcp://[::1]:1"),
        ("tcp://10.0.0.1:1", "127.0.0.1", "tcp://10.0.0.1:1"),
        ("ipc:///tmp/events", "127.0.0.1", "ipc:///tmp/events"),
    ],
)
def test_wildcards_are_reached_at_the_engines_host(address: str, host: str, expected: str) -> None:
    assert reachable(address, host) == expected


@pytest.mark.parametrize("ranks", [0, 257])
def test_a_senseless_number_of_ranks_is_refused(ranks: int) -> None:
    with pytest.raises(SourceError):
        of_ranks(KvSource(rank=0, events="tcp://127.0.0.1:1", replay=None), ranks)


def test_an_address_that_has_no_port_has_no_ranks() -> None:
    with pytest.raises(SourceError):
        of_ranks(KvSource(rank=0, events="ipc:///tmp/events", replay=None), 2)


def test_a_rank_with_thousands_of_digits_is_refused() -> None:
    with pytest.raises(SourceError):
        discovered_sources({"9" * 5_000: {"publisher": "zmq", "endpoint": "tcp://*:5557"}}, "127.0.0.1")
