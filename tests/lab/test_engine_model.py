"""The emulated engine against cases worked out by hand, and its books under random load."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest, FinishReason, Refusal, StepOutcome
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from trimtab_lab.step_time import StepTime
from trimtab_lab.token_chain import LoraAdapter


def engine(
    *, blocks: int = 64, block_tokens: int = 4, batched: int = 64, requests: int = 8, context: int = 64
) -> EngineModel:
    return EngineModel(
        EngineSettings(
            block_count=blocks,
            block_tokens=block_tokens,
            batched_tokens_max=batched,
            requests_max=requests,
            context_tokens_max=context,
        ),
        StepTime(base_s=1.0, prefill_token_s=0.1, decode_request_s=0.01, prefill_attention_s=0, decode_attention_s=0),
    )


def ask(
    model: EngineModel, name: str, prompt: list[int], *, output: int = 1, now_s: float = 0.0, **more: object
) -> None:
    request = EngineRequest(request_id=name, prompt=prompt, output=[900] * output, **more)  # type: ignore[arg-type]
    assert model.add(request, now_s) is None


def run_dry(model: EngineModel, now_s: float = 0.0) -> list[StepOutcome]:
    outcomes = []
    while model.has_work:
        outcome = model.step(now_s)
        assert outcome is not None
        model.check_invariants()
        outcomes.append(outcome)
        now_s = outcome.ended_s
    return outcomes


def events_of(outcomes: list[StepOutcome]) -> list[KvEvent]:
    return [event for outcome in outcomes for event in outcome.kv_events]


def served(model: EngineModel, name: str, prompt: list[int], **more: object) -> tuple[int, list[KvEvent]]:
    """(cached tokens, events) of one request served alone."""
    ask(model, name, prompt, **more)  # type: ignore[arg-type]
    outcomes = run_dry(model)
    [finished] = [done for outcome in outcomes for done in outcome.finished]
    return finished.cached_tokens, events_of(outcomes)


# -- the prefix cache


def test_a_prompt_is_stored_in_one_event_with_its_whole_blocks_only() -> None:
    model = engine()
    cached, [stored] = served(model, "a", list(range(10)))
    assert cached == 0
    assert isinstance(stored, BlockStored)
    assert stored.parent is None
    assert len(stored.block_hashes) == 2
    assert list(stored.tokens) == list(range(8))


def test_the_same_prompt_again_hits_its_whole_blocks_and_emits_nothing() -> None:
    model = engine()
    served(model, "a", list(range(10)))
    assert served(model, "b", list(range(10))) == (8, [])


def test_a_full_hit_computes_the_last_block_again_and_stores_it_twice() -> None:
    """12 tokens are 3 blocks; the last token must be computed, so the hit is 8, and the third block is stored anew."""
    model = engine()
    _, [first] = served(model, "a", list(range(12)))
    cached, [again] = served(model, "b", list(range(12)))
    assert cached == 8
    assert isinstance(first, BlockStored)
    assert isinstance(again, BlockStored)
    assert again.block_hashes == first.block_hashes[2:]
    assert again.parent == first.block_hashes[1]
    assert model.cached_copies()[first.block_hashes[2]] == 2


def test_each_copy_of_a_block_is_removed_on_its_own() -> None:
    model = engine(blocks=9, context=32)
    for name in "abcd":
        served(model, name, list(range(12)))
    last = max(model.cached_copies(), key=model.cached_copies().__getitem__)
    assert model.cached_copies()[last] == 4
    _, events = served(model, "e", list(range(100, 128)))
    assert [event for event in events if isinstance(event, BlockRemoved)].count(BlockRemoved(block_hash=last)) == 4
    assert last not in model.cached_copies()


def test_generated_tokens_fill_blocks_that_the_next_turn_hits() -> None:
    """Of 6 prompt and 6 output tokens the last is sampled but never computed, so 11 are, in 2 whole blocks."""
    model = engine()
    _, events = served(model, "a", list(range(6)), output=6)
    assert [list(event.tokens) for event in events if isinstance(event, BlockStored)] == [
        [0, 1, 2, 3],
        [4, 5, 900, 900],
    ]
    cached, _ = served(model, "b", [*range(6), *[900] * 6, 7, 8])
    assert cached == 8


def test_eviction_waits_for_need_and_eats_the_oldest_chain_from_its_tail() -> None:
    model = engine(blocks=8, context=28)  # 7 blocks serve
    _, [stored] = served(model, "a", list(range(13)))  # 3 cached, 1 not
    assert isinstance(stored, BlockStored)
    _, events = served(model, "b", list(range(100, 121)))  # needs 6: 4 never cached, then 2 of the chain's tail
    removed = [event.block_hash for event in events if isinstance(event, BlockRemoved)]
    assert removed == [stored.block_hashes[2], stored.block_hashes[1]]
    assert isinstance(events[-1], BlockStored), "removals come before what is stored in their place"
    assert served(model, "c", list(range(13)))[0] == 4


def test_a_hit_saves_blocks_from_eviction() -> None:
    model = engine(blocks=10, context=36)
    served(model, "old", list(range(9)))
    served(model, "young", list(range(50, 59)))
    served(model, "hit", list(range(9)))
    served(model, "big", list(range(100, 125)))  # 7 of 9 blocks: takes "young", not "old"
    assert served(model, "q", list(range(9)))[0] == 8
    assert served(model, "r", list(range(50, 59)))[0] == 0


def test_lora_adapters_and_salts_do_not_share_blocks() -> None:
    model = engine()
    prompt = list(range(9))
    adapter = LoraAdapter(name="a1", adapter_id=1)
    served(model, "plain", prompt)
    cached, [stored] = served(model, "lora", prompt, lora=adapter, cache_salt="pepper")
    assert cached == 0
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == (("a1", "pepper"), ("a1",))
    assert (stored.lora_id, stored.lora_name) == (1, "a1")
    assert served(model, "moved", prompt, lora=LoraAdapter(name="a1", adapter_id=1, path="other"))[0] == 0
    assert served(model, "salt", prompt, cache_salt="salt")[0] == 0
    assert served(model, "again", prompt, lora=adapter, cache_salt="pepper")[0] == 8
    chains = {(chain.lora_name, chain.cache_salt) for chain in model.live_chains()}
    assert chains == {(None, None), ("a1", "pepper"), ("a1", None), (None, "salt")}


def test_a_request_that_does_not_read_the_cache_computes_everything() -> None:
    model = engine()
    served(model, "a", list(range(9)))
    cached, [stored] = served(model, "b", list(range(9)), reads_cache=False)
    assert cached == 0
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 2
    assert model.stats().cache_queries_tokens == 9


def test_a_request_scheduled_in_the_same_step_already_hits_the_first_ones_blocks() -> None:
    model = engine()
    ask(model, "a", list(range(9)))
    ask(model, "b", list(range(9)))
    outcome = model.step(0.0)
    assert outcome is not None
    assert {done.request_id: done.cached_tokens for done in outcome.finished} == {"a": 0, "b": 8}
    assert outcome.prefill_tokens == 9 + 1


def test_reset_forgets_everything_and_says_so_at_the_next_step() -> None:
    model = engine()
    served(model, "a", list(range(9)))
    assert model.reset_prefix_cache()
    assert model.cached_copies() == {}
    cached, events = served(model, "b", list(range(9)))
    assert cached == 0
    assert events[0] == AllBlocksCleared()
    ask(model, "c", list(range(9)), output=3)
    model.step(0.0)
    assert not model.reset_prefix_cache(), "a running request holds blocks"
    assert model.reset_prefix_cache(preempt_running=True)
    assert [done.output_tokens for outcome in run_dry(model) for done in outcome.finished] == [3]


def test_a_restart_is_a_new_engine_and_emits_nothing() -> None:
    model = engine()
    served(model, "a", list(range(9)))
    ask(model, "b", list(range(20)), output=5)
    model.schedule(0.0)
    assert model.restart() == ("b",)
    assert (model.epoch, model.has_work, model.cached_copies()) == (1, False, {})
    assert model.stats().prompt_tokens == 0
    assert served(model, "c", list(range(9)))[0] == 0


# -- batching


def test_a_long_prompt_is_computed_in_chunks_and_stored_chunk_by_chunk() -> None:
    model = engine(batched=10)
    ask(model, "a", list(range(25)))
    outcomes = run_dry(model)
    assert [outcome.prefill_tokens for outcome in outcomes] == [10, 10, 5]
    assert [len(outcome.new_tokens) for outcome in outcomes] == [0, 0, 1]
    sizes = [[len(e.block_hashes) for e in o.kv_events if isinstance(e, BlockStored)] for o in outcomes]
    assert sizes == [[2], [3], [1]]


def test_running_requests_go_before_waiting_ones_within_the_token_budget() -> None:
    model = engine(batched=10)
    ask(model, "a", list(range(4)), output=3)
    model.step(0.0)
    ask(model, "b", list(range(100, 120)), now_s=1.4)
    outcome = model.step(1.4)
    assert outcome is not None
    assert (outcome.decode_requests, outcome.prefill_tokens) == (1, 9)


def test_a_step_takes_what_its_parts_cost() -> None:
    model = engine()
    ask(model, "a", list(range(4)), output=2)
    first = model.step(5.0)
    assert first is not None
    assert (first.started_s, first.ended_s) == (5.0, pytest.approx(6.4))
    ask(model, "b", list(range(100, 110)), now_s=6.0)
    second = model.step(first.ended_s)
    assert second is not None
    assert second.duration_s == pytest.approx(1.0 + 10 * 0.1 + 0.01)


def test_requests_beyond_the_limit_wait_their_turn() -> None:
    model = engine(requests=2)
    for name in "abc":
        ask(model, name, [1, 2, 3], output=2)
    model.step(0.0)
    assert (model.stats().running, model.stats().waiting) == (2, 1)
    finished = [done.request_id for outcome in run_dry(model, 1.0) for done in outcome.finished]
    assert finished == ["a", "b", "c"]


def test_a_prompt_that_does_not_fit_whole_waits_and_holds_back_those_behind_it() -> None:
    model = engine(blocks=9, context=32)
    ask(model, "a", list(range(17)), output=2)  # 5 of 8 blocks
    ask(model, "b", list(range(100, 115)))  # 4
    ask(model, "c", [1])
    outcome = model.step(0.0)
    assert outcome is not None
    assert (model.stats().running, model.stats().waiting) == (1, 2)
    assert [done.request_id for outcome in run_dry(model, 1.0) for done in outcome.finished] == ["a", "b", "c"]


def test_out_of_blocks_the_last_admitted_request_is_preempted_and_finds_its_own_blocks_again() -> None:
    model = engine(blocks=7, context=24)  # 6 blocks serve
    ask(model, "a", list(range(10)), output=8)  # grows to 5 blocks
    ask(model, "b", list(range(100, 109)), output=4)  # holds 3
    outcomes = run_dry(model)
    assert [name for outcome in outcomes for name in outcome.preempted] == ["b"]
    done = {finished.request_id: finished for outcome in outcomes for finished in outcome.finished}
    assert done["b"].preemptions == 1
    assert (done["a"].output_tokens, done["b"].output_tokens) == (8, 4)
    assert model.stats().preemptions == 1
    assert model.stats().cache_queries_tokens == 10 + 9, "a resumed request does not count as a new query"


def test_a_preempted_request_goes_back_to_the_head_of_the_queue() -> None:
    """Those behind it wait, though two blocks are free and the next one needs a single one."""
    model = engine(blocks=7, context=24)
    ask(model, "a", list(range(10)), output=8)
    ask(model, "b", list(range(100, 109)), output=4)
    ask(model, "c", [1])
    outcomes = run_dry(model)
    [preempting] = [number for number, outcome in enumerate(outcomes) if outcome.preempted]
    tokens = [[token.request_id for token in outcome.new_tokens] for outcome in outcomes]
    assert tokens[:preempting] == [["a", "b"]] * 3
    assert tokens[preempting:] == [["a"]] * 5 + [["b", "c"]]


def test_an_abort_frees_blocks_at_once_and_a_step_under_way_gives_it_nothing() -> None:
    model = engine()
    ask(model, "a", list(range(9)), output=5)
    ask(model, "b", [1, 2], output=1)
    model.schedule(0.0)
    aborted = model.abort("a", 0.5)
    assert aborted is not None
    assert (aborted.reason, aborted.output_tokens) == (FinishReason.ABORT, 0)
    assert model.abort("a", 0.6) is None
    outcome = model.complete(1.0)
    assert [token.request_id for token in outcome.new_tokens] == ["b"]
    assert [event for event in outcome.kv_events if isinstance(event, BlockStored)], "its blocks stay cached"
    assert model.stats().kv_usage == 0.0
    model.check_invariants()


def test_what_the_engine_cannot_take_is_refused_with_the_reason() -> None:
    model = EngineModel(
        EngineSettings(block_count=64, block_tokens=4, context_tokens_max=16, queued_requests_max=1, requests_max=1)
    )
    long = EngineRequest(request_id="long", prompt=[1] * 16, output=[1])
    assert model.add(long, 0.0) is Refusal.TOO_LONG
    ask(model, "a", [1])
    assert model.add(EngineRequest(request_id="a", prompt=[1], output=[1]), 0.0) is Refusal.DUPLICATE
    assert model.add(EngineRequest(request_id="b", prompt=[1], output=[1]), 0.0) is Refusal.QUEUE_FULL


def test_a_cache_too_small_for_one_request_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="cannot hold one request"):
        EngineSettings(block_count=4, block_tokens=4, context_tokens_max=13)


def test_embeddings_end_with_their_prefill() -> None:
    model = engine()
    request = EngineRequest(request_id="e", prompt=list(range(9)), output=[], prefill_only=True)
    assert model.add(request, 0.0) is None
    [outcome] = run_dry(model)
    assert outcome.new_tokens == ()
    assert [(done.output_tokens, done.prompt_tokens) for done in outcome.finished] == [(0, 9)]


def test_two_runs_of_the_same_load_are_the_same() -> None:
    def run() -> list[StepOutcome]:
        model = engine(blocks=9, context=32)
        for number, name in enumerate("abcdef"):
            ask(model, name, [*range(5), *range(number, number + 6)], output=4)
        return run_dry(model)

    assert run() == run()


# -- random load


class LiteralConsumer:
    """What a consumer must do with the events, written down word for word: count copies, drop at the last removal."""

    def __init__(self) -> None:
        self.copies: Counter[bytes] = Counter()
        self.prefix: dict[bytes, tuple[int, ...]] = {}

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.copies.clear()
            return
        if isinstance(event, BlockRemoved):
            self.copies[event.block_hash] -= 1
            if not self.copies[event.block_hash]:
                del self.copies[event.block_hash]
            return
        parent = event.parent
        assert parent is None or parent in self.copies, "a parent that nobody announced"
        for index, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.tokens[index * event.block_tokens : (index + 1) * event.block_tokens])
            before = () if parent is None else self.prefix[parent]
            assert self.prefix.setdefault(block_hash, before + tokens) == before + tokens
            self.copies[block_hash] += 1
            parent = block_hash


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"), st.integers(0, 3), st.integers(1, 22), st.integers(1, 9), st.sampled_from([None, "x"])
        ),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("reset"), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.integers(9, 16))
def test_events_replayed_word_for_word_equal_the_cache_after_every_step(operations: list[tuple], blocks: int) -> None:
    model, consumer, now_s, asked = engine(blocks=blocks, context=32, batched=12, requests=4), LiteralConsumer(), 0.0, 0
    outputs: Counter[str] = Counter()
    wanted: dict[str, int] = {}
    ended: dict[str, FinishReason] = {}

    def finish_step() -> None:
        nonlocal now_s
        outcome = model.complete(now_s + 1.0)
        now_s = outcome.ended_s
        model.check_invariants()
        for event in outcome.kv_events:
            consumer.apply(event)
        assert dict(consumer.copies) == model.cached_copies()
        for token in outcome.new_tokens:
            outputs[token.request_id] += 1
        for done in outcome.finished:
            assert outputs[done.request_id] == wanted[done.request_id] == done.output_tokens
            assert done.cached_tokens <= (done.prompt_tokens - 1) // 4 * 4
            ended[done.request_id] = done.reason

    for operation in operations:
        if operation[0] == "ask":
            _, family, length, output, salt = operation
            prompt = [family, *range(length)] if family else list(range(length + 1))
            name = str(asked)
            asked, wanted[name] = asked + 1, output
            ask(model, name, prompt, output=output, now_s=now_s, cache_salt=salt)
        elif operation[0] == "step":
            for _ in range(operation[1]):
                if model.schedule(now_s) is not None:
                    model.check_invariants()
                    finish_step()
        elif operation[0] == "abort":
            in_step = operation[2] and model.schedule(now_s) is not None
            done = model.abort(str(operation[1]), now_s)
            if done is not None:
                ended[done.request_id] = done.reason
            model.check_invariants()
            if in_step:
                finish_step()
        else:
            model.reset_prefix_cache(preempt_running=operation[1])
            model.check_invariants()
    while model.schedule(now_s) is not None:
        finish_step()
    assert len(ended) == asked, "every request ends exactly once"
    assert model.stats().kv_usage == 0.0
    live = {block for chain in model.live_chains() for block in chain.block_hashes}
    assert live == set(model.cached_copies())
    for chain in model.live_chains():
        assert consumer.prefix[chain.block_hashes[-1]] == chain.tokens
