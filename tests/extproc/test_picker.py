"""Decisions over a real scheduler: who is chosen, what is reserved and told, and what happens to odd requests."""

import asyncio
import json

import msgspec
import pytest
from picker_rig import CARD, SEED, PickerRig, chat

from trimtab_core.chunks import U64, hash_chunks, root_hash
from trimtab_extproc import offload
from trimtab_extproc.decisions import REQUEST_ID_CHARS_MAX
from trimtab_extproc.errors import NotReady
from trimtab_extproc.events import Placed, Refused
from trimtab_extproc.replies import Decide
from trimtab_state import Policy, ServedModel

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


@pytest.fixture
def rig() -> PickerRig:
    return PickerRig()


def chain_of(text: str, lora_name: str | None = None) -> U64:
    rendered = CARD.normalize(f"<user>{text}<assistant>")
    return hash_chunks(rendered, root_hash(SEED, lora_name), SEED)


async def test_before_the_pool_is_known_there_is_no_choice(rig: PickerRig) -> None:
    with pytest.raises(NotReady):
        await rig.ask()
    rig.fleet.on_connected(True)
    rig.fleet.on_control(None)
    with pytest.raises(NotReady):
        await rig.ask()
    rig.announce(A)
    assert isinstance(await rig.ask(), Placed)
    rig.fleet.on_connected(False)
    assert isinstance(await rig.ask(), Placed)


async def test_the_endpoint_that_holds_the_prompt_is_chosen(rig: PickerRig) -> None:
    rig.announce(A, B, C)
    text = "a long story " * 100
    rig.hold(B, chain_of(text))
    for _ in range(5):
        placed = await rig.place(chat(text))
        assert placed.endpoint == B
        rig.finish(placed)
    assert not placed.is_first_token_wanted
    assert rig.last()["approximate"] is None
    assert rig.count("trimtab_predicted_hit_tokens_total", model_name="m") > 1_000


async def test_choosing_and_reserving_are_one_step_and_told_to_the_others(rig: PickerRig) -> None:
    rig.announce(A, B)
    placed = await rig.place(chat("x" * 1_000))
    assert rig.requests()[placed.endpoint] == 1
    kind, reservation_id, endpoint, p_tokens, batch = rig.log.entries[-1]
    assert (kind, reservation_id, endpoint, batch) == ("reserve", placed.reservation_id, placed.endpoint, 1)
    assert p_tokens > 200
    rig.finish(placed)
    rig.finish(placed)
    assert rig.requests() == {A: 0, B: 0}
    assert [entry for entry in rig.log.entries if entry[0] == "finished"] == [("finished", placed.reservation_id)]


async def test_requests_at_the_same_time_see_each_other(rig: PickerRig) -> None:
    rig.announce(A, B, C)
    placed = await asyncio.gather(*(rig.place(chat(f"{index}" * 5_000)) for index in range(30)))
    assert sorted(rig.requests().values()) == [10, 10, 10]
    for each in placed:
        rig.finish(each)
    assert sum(rig.requests().values()) == 0
    rig.scheduler.check_invariants()


async def test_the_destination_lists_fallbacks_behind_the_choice(rig: PickerRig) -> None:
    rig.announce(A, B, C)
    placed = await rig.place()
    first, *rest = placed.destination.split(",")
    assert first == placed.endpoint
    assert sorted([first, *rest]) == [A, B, C]


async def test_fallbacks_are_only_those_that_the_same_rank_suits(rig: PickerRig) -> None:
    rig.announce(f"{A}/0", f"{B}/1")
    placed = await rig.place()
    assert placed.destination == (A if placed.rank == 0 else B)
    rig.announce(f"{A}/0", f"{A}/1", f"{B}/0")
    placed = await rig.place(chat(subset=(A,)))
    assert placed.destination == A
    assert placed.endpoint == f"{A}/{placed.rank}"


async def test_several_sequences_count_as_several_requests(rig: PickerRig) -> None:
    rig.announce(A)
    placed = await rig.place(chat(n=4))
    assert rig.requests() == {A: 4}
    rig.finish(placed)
    assert rig.requests() == {A: 0}


async def test_the_reservation_moves_with_the_request(rig: PickerRig) -> None:
    rig.announce(A, B)
    placed = await rig.place()
    other = B if placed.endpoint == A else A
    rig.reservations.served(placed.reservation_id, placed.endpoint, now_s=rig.now_s)
    assert rig.count("trimtab_moved_requests_total") == 0
    rig.reservations.served(placed.reservation_id, other, now_s=rig.now_s)
    assert rig.requests()[other] == 1
    assert rig.log.entries[-1] == ("moved", placed.reservation_id, other)
    assert rig.count("trimtab_moved_requests_total") == 1
    rig.reservations.served(placed.reservation_id, "10.9.9.9:1", now_s=rig.now_s)
    assert rig.requests()[other] == 1
    assert rig.count("trimtab_unknown_served_requests_total") == 1


async def test_first_tokens_are_told_once_whoever_saw_them(rig: PickerRig) -> None:
    rig.announce(A)
    text = "z" * 4_000
    placed = await rig.place(chat(text))
    rig.hold(A, chain_of(text))
    rig.reservations.first_token(placed.reservation_id, now_s=rig.now_s)
    told = [entry for entry in rig.log.entries if entry[0] == "first_token"]
    assert told == [("first_token", placed.reservation_id)]


async def test_a_pool_at_its_limit_sheds_with_429(rig: PickerRig) -> None:
    rig.announce(A, B, policy=Policy(batch_limit=1))
    placed = [await rig.place(), await rig.place()]
    refused = await rig.ask()
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason) == (429, "endpoints_full")
    assert refused.retry_after_s is not None
    rig.finish(placed[0])
    assert isinstance(await rig.ask(), Placed)


async def test_no_endpoint_is_503(rig: PickerRig) -> None:
    rig.announce()
    refused = await rig.ask()
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason, refused.retry_after_s) == (503, "no_endpoints", None)


@pytest.mark.parametrize("subset", [(), ("10.9.9.9",), ("10.0.0.1:9999",)])
async def test_a_subset_without_a_match_is_503(subset: tuple[str, ...], rig: PickerRig) -> None:
    rig.announce(A, B)
    refused = await rig.ask(chat(subset=subset))
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason) == (503, "subset_empty")
    assert rig.count("trimtab_rejected_total", reason="subset_empty") == 1


async def test_a_subset_keeps_its_ports_and_a_bare_ip_means_all_of_them(rig: PickerRig) -> None:
    other_port = "10.0.0.1:8001"
    rig.announce(A, other_port, B)
    assert {(await rig.place(chat(subset=(A,)))).destination for _ in range(6)} == {A}
    placed = await rig.place(chat(subset=("10.0.0.1",)))
    assert set(placed.destination.split(",")) == {A, other_port}
    verdicts = {row["endpoint"]: row["verdict"] for row in rig.last()["endpoints"]}
    assert verdicts[B] == "no candidate: outside the request's subset"


async def test_endpoints_that_cannot_serve_are_not_chosen_and_the_decision_says_why(rig: PickerRig) -> None:
    rig.announce(A, B, C)
    rig.beat(B, state="asleep")
    rig.beat(C, state="draining")
    assert {(await rig.place()).endpoint for _ in range(6)} == {A}
    verdicts = {row["endpoint"]: row["verdict"] for row in rig.last()["endpoints"]}
    assert (verdicts[B], verdicts[C]) == ("no candidate: asleep", "no candidate: draining")


async def test_a_test_header_chooses_only_in_test_mode() -> None:
    for is_conformance_test, expected in ((True, {C}), (False, {A, B, C})):
        rig = PickerRig(is_conformance_test=is_conformance_test)
        rig.announce(A, B, C)
        request = chat(headers={"test-epp-endpoint-selection": "10.0.0.3"})
        assert {(await rig.place(request)).endpoint for _ in range(9)} == expected


async def test_an_adapters_prompts_hit_only_its_own_blocks(rig: PickerRig) -> None:
    rig.announce(A, B)
    served = {"m": ServedModel(card=CARD.digest()), "lora": ServedModel(card=CARD.digest(), lora=True)}
    for name in (A, B):
        rig.beat(name, models=served)
    text = "a long story " * 100
    rig.hold(A, chain_of(text))
    rig.hold(B, chain_of(text, "lora"))
    base = [await rig.place(chat(text)) for _ in range(1)]
    assert base[0].endpoint == A
    assert (await rig.place(chat(text, model="lora"))).endpoint == B


async def test_two_cards_in_one_pool_are_each_rendered(rig: PickerRig) -> None:
    rig.announce(A, B)
    other = type(CARD)(template="[{{ messages[0].content }}]", exact=True, reason="")
    rig.fleet.on_card(other.digest(), other.encode())
    rig.beat(B, models={"m": ServedModel(card=other.digest())})
    text = "a long story " * 100
    rig.hold(B, hash_chunks(f"[{text}]".encode(), root_hash(SEED), SEED))
    assert (await rig.place(chat(text))).endpoint == B
    hits = {row["endpoint"]: row["hit_tokens"] for row in rig.last()["endpoints"]}
    assert hits[A] == 0
    assert hits[B] > 200


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"models": {"m": ServedModel()}}, "no_card"),
        ({"models": {"m": ServedModel(card=CARD.digest())}, "approximate": "hybrid"}, "engine"),
    ],
)
async def test_without_an_exact_view_the_choice_is_approximate_and_counted(
    fields: dict[str, object], reason: str, rig: PickerRig
) -> None:
    rig.announce(A, B, is_beating=False)
    for name in (A, B):
        rig.beat(name, **fields)
    text = "a long story " * 200
    first = await rig.place(chat(text))
    rig.reservations.first_token(first.reservation_id, now_s=rig.now_s)
    rig.finish(first)
    rig.now_s += 60
    rig.scheduler.advance(rig.now_s)
    again = [await rig.place(chat(text)) for _ in range(1)]
    assert again[0].endpoint == first.endpoint
    assert again[0].is_first_token_wanted
    assert rig.count("trimtab_approximate_decisions_total", reason=reason) == 2


async def test_a_pool_without_sidecars_keeps_a_conversation_together(rig: PickerRig) -> None:
    rig.announce(A, B, is_beating=False)
    text = "a long story " * 200
    first = await rig.place(chat(text))
    rig.reservations.first_token(first.reservation_id, now_s=rig.now_s)
    rig.finish(first)
    rig.now_s += 60
    rig.scheduler.advance(rig.now_s)
    assert (await rig.place(chat(text + "and then?"))).endpoint == first.endpoint
    assert rig.count("trimtab_approximate_decisions_total", reason="no_heartbeat") == 2


async def test_without_heartbeats_the_size_of_a_prompt_counts_as_load(rig: PickerRig) -> None:
    rig.announce(A, B, is_beating=False)
    big = await rig.place(chat("x" * 30_000))
    assert rig.last()["prompt_tokens"] > 5_000
    assert {(await rig.place(chat("small"))).endpoint for _ in range(1)} == {B if big.endpoint == A else A}
    assert rig.count("trimtab_approximate_decisions_total", reason="no_heartbeat") == 2


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", b"", "empty"),
        ("/v1/chat/completions", b"not json", "json"),
        ("/v1/chat/completions", b"[]", "json"),
        ("/v1/unheard-of", b"{}", "path"),
        ("", b"{}", "path"),
    ],
)
async def test_what_nobody_understands_is_routed_all_the_same(
    path: str, body: bytes, reason: str, rig: PickerRig
) -> None:
    rig.announce(A, B)
    headers = {":method": "POST"} | ({":path": path} if path else {})
    placed = await rig.ask(Decide(headers=headers, body=body, subset=None, is_body_known=True))
    assert isinstance(placed, Placed)
    assert rig.last()["approximate"] == reason


@pytest.mark.parametrize(
    "content", [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}, {"input": "hi"}]
)
async def test_without_a_path_the_body_tells_its_format(content: dict[str, object], rig: PickerRig) -> None:
    rig.announce(A)
    body = json.dumps({"model": "m"} | content).encode()
    await rig.place(Decide(headers={"x-any": "1"}, body=body, subset=None, is_body_known=True))
    assert rig.last()["approximate"] is None
    assert rig.last()["model"] == "m"


async def test_a_body_that_is_not_shown_counts_by_its_length(rig: PickerRig) -> None:
    rig.announce(A)
    headers = {":method": "POST", ":path": "/v1/chat/completions", "content-length": "40000"}
    await rig.place(Decide(headers=headers, body=b"", subset=None, is_body_known=False))
    assert rig.last()["approximate"] == "body_not_shown"
    assert rig.last()["prompt_tokens"] == 10_000


async def test_a_follow_up_goes_to_the_endpoint_that_holds_the_response_even_while_that_drains(rig: PickerRig) -> None:
    rig.announce(A, B, C)
    rig.stored.known["resp_1"] = B
    rig.beat(B, state="draining")
    body = json.dumps({"model": "m", "input": "more", "previous_response_id": "resp_1"}).encode()
    headers = {":method": "POST", ":path": "/v1/responses"}
    request = Decide(headers=headers, body=body, subset=None, is_body_known=True)
    by_id = Decide(
        headers={":method": "GET", ":path": "/v1/responses/resp_1"}, body=b"", subset=None, is_body_known=True
    )
    for asked in (request, by_id):
        assert (await rig.place(asked)).endpoint == B
    rig.beat(B, state="unreachable")
    assert {(await rig.place(request)).endpoint for _ in range(8)} == {A, C}


async def test_the_id_of_a_new_response_is_wanted_and_remembered(rig: PickerRig) -> None:
    rig.announce(A)
    body = json.dumps({"model": "m", "input": "hi"}).encode()
    placed = await rig.place(
        Decide(headers={":method": "POST", ":path": "/v1/responses"}, body=body, subset=None, is_body_known=True)
    )
    assert placed.is_id_wanted
    rig.reservations.named(placed.reservation_id, "resp_2")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert rig.stored.known == {"resp_2": A}


async def test_usage_is_set_against_the_prediction(rig: PickerRig) -> None:
    rig.announce(A)
    text = "a long story " * 100
    rig.hold(A, chain_of(text))
    placed = await rig.place(chat(text))
    rig.reservations.used(placed.reservation_id, prompt_tokens=330, cached_tokens=320)
    assert rig.count("trimtab_measured_hit_tokens_total", model_name="m") == 320
    assert 300 <= rig.count("trimtab_measured_predicted_hit_tokens_total", model_name="m") <= 330


async def test_large_prompts_are_hashed_off_the_event_loop_to_the_same_end(rig: PickerRig) -> None:
    rig.announce(A, B)
    text = "a long story " * 10_000
    rig.hold(B, chain_of(text))
    assert (await rig.place(chat(text))).endpoint == B


async def test_too_many_large_prompts_at_once_are_routed_by_load(
    rig: PickerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "JOBS_MAX", 0)
    rig.announce(A)
    placed = await rig.place(chat("x" * 100_000))
    assert placed.endpoint == A
    assert rig.last()["approximate"] == "prompt_queue_full"
    assert rig.last()["prompt_tokens"] > 20_000


async def test_the_fleet_may_change_while_a_large_prompt_is_hashed(rig: PickerRig) -> None:
    rig.announce(A, B)
    text = "a long story " * 10_000
    rig.hold(A, chain_of(text))
    deciding = asyncio.create_task(rig.place(chat(text)))
    await asyncio.sleep(0)
    rig.announce(A, B, C)
    rig.beat(A, state="draining")
    rig.beat(B, models={"m": ServedModel()})
    placed = await deciding
    assert placed.endpoint in (B, C)
    rig.finish(placed)
    assert sum(rig.requests().values()) == 0


async def test_a_decision_that_is_cancelled_before_the_choice_reserves_nothing(rig: PickerRig) -> None:
    rig.announce(A)
    deciding = asyncio.create_task(rig.place(chat("x" * 200_000)))
    await asyncio.sleep(0)
    deciding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deciding
    assert rig.requests() == {A: 0}
    assert rig.log.entries == []


async def test_a_fault_after_the_choice_leaves_no_reservation_behind(
    rig: PickerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.announce(A, B)

    def fail(*arguments: object) -> None:
        raise RuntimeError("the log of decisions is broken")

    monkeypatch.setattr(rig.decisions, "add", fail)
    with pytest.raises(RuntimeError, match="broken"):
        await rig.ask()
    assert rig.scheduler.load().requests.tolist() == [0, 0]
    assert len(rig.reservations) == 0


async def test_model_names_of_clients_do_not_become_labels(rig: PickerRig) -> None:
    rig.announce(A)
    for index in range(50):
        rig.finish(await rig.place(chat(model=f"made-up-{index}")))
    text = rig.telemetry.expose().decode()
    assert "made-up" not in text
    assert rig.count("trimtab_prompt_tokens_total", model_name="unknown") > 0


async def test_an_endpoint_that_goes_takes_its_reservations_with_it(rig: PickerRig) -> None:
    rig.announce(A, is_beating=False)
    placed = await rig.place()
    rig.announce(B, is_beating=False)
    rig.fleet.sweep(rig.now_s)
    rig.now_s += 31
    rig.fleet.sweep(rig.now_s)
    assert rig.table.named(A) is None
    again = await rig.place()
    rig.finish(placed)
    assert rig.requests() == {B: 1}
    rig.finish(again)
    rig.scheduler.check_invariants()


async def test_of_a_requests_own_id_no_more_than_its_start_is_kept(rig: PickerRig) -> None:
    rig.announce(A)
    request = msgspec.structs.replace(chat(), headers={**chat().headers, "x-request-id": "i" * 60_000})
    await rig.place(request)
    assert rig.last()["request_id"] == "i" * REQUEST_ID_CHARS_MAX


async def test_many_small_prompts_are_no_small_work(rig: PickerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.announce(A)
    monkeypatch.setattr(offload, "JOBS_MAX", 0)
    prompts = ["x"] * 100
    body = msgspec.json.encode({"model": "m", "prompt": prompts})
    headers = {**chat().headers, ":path": "/v1/completions"}
    await rig.place(msgspec.structs.replace(chat(), headers=headers, body=body))
    assert rig.last()["approximate"] == "prompt_queue_full"
