"""The emulator over real HTTP and ZeroMQ, as a sidecar, a router or a client meets it."""

import asyncio
import json
from collections import Counter
from typing import Any

import aiohttp
import openai
import pytest
from lab_rig import Consumer, Start, capture, until
from prometheus_client.parser import text_string_to_metric_families

from trimtab_lab.answer import Wishes
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest
from trimtab_lab.step_time import StepTime
from trimtab_lab.vocabulary import Vocabulary

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a trim tab?"}]
WORDS = "the small surface that steers the rudder that steers the ship " * 40
SLOW = StepTime(base_s=0.05, prefill_token_s=0, decode_request_s=0, prefill_attention_s=0, decode_attention_s=0)


def token_prompt(start: int, count: int) -> list[int]:
    return [10 + (start + index) % 3000 for index in range(count)]


# -- the OpenAI client


async def test_the_openai_client_chats_streamed_and_whole_and_gets_the_same_answer(emulated: Start) -> None:
    async with emulated() as emulator, openai.AsyncOpenAI(base_url=f"{emulator.url}/v1", api_key="-") as client:
        whole = await client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=20)
        stream = await client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "length"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
        assert whole.usage.prompt_tokens_details is not None
        assert chunks[-1].usage.prompt_tokens_details is not None
        cached = whole.usage.prompt_tokens // 16 * 16
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == cached > 0


async def test_the_openai_client_completes_embeds_and_responds(emulated: Start) -> None:
    async with emulated() as emulator, openai.AsyncOpenAI(base_url=f"{emulator.url}/v1", api_key="-") as client:
        completion = await client.completions.create(model="tiny", prompt=["one", "two"], max_tokens=3, n=2)
        assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 12
        vector = await client.embeddings.create(model="tiny", input=["one", "two"])
        assert len(vector.data[0].embedding) == len(vector.data[1].embedding) == 64
        first = await client.responses.create(model="tiny", input="Hello", max_output_tokens=40)
        again = await client.responses.create(
            model="tiny", input="And then?", max_output_tokens=5, previous_response_id=first.id
        )
        assert again.usage is not None
        assert first.usage is not None
        assert again.usage.input_tokens > first.usage.input_tokens + 40
        assert again.usage.input_tokens_details.cached_tokens >= (first.usage.input_tokens + 39) // 16 * 16
        events = [
            event.type
            async for event in await client.responses.create(model="tiny", input="x", max_output_tokens=2, stream=True)
        ]
        assert events[0] == "response.created"
        assert events.count("response.output_text.delta") == 2
        assert events[-1] == "response.incomplete"


async def test_a_chat_that_goes_on_from_the_answer_finds_the_answers_blocks(emulated: Start) -> None:
    async with emulated() as emulator:
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 60, "ignore_eos": True}
        first = await emulator.post("/v1/chat/completions", body)
        messages = [*CHAT, first["choices"][0]["message"], {"role": "user", "content": "Why is it called that?"}]
        messages = [{"role": message["role"], "content": message["content"]} for message in messages]
        second = await emulator.post("/v1/chat/completions", {**body, "messages": messages})
        computed = first["usage"]["prompt_tokens"] + 59
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


async def test_answers_end_by_themselves_unless_told_not_to(emulated: Start) -> None:
    async with emulated(answer_tokens_min=5, answer_tokens_max=9) as emulator:
        body = {"messages": CHAT}
        short = await emulator.post("/v1/chat/completions", body)
        assert short["choices"][0]["finish_reason"] == "stop"
        assert 5 <= short["usage"]["completion_tokens"] <= 9
        long = await emulator.post("/v1/chat/completions", {**body, "ignore_eos": True, "max_tokens": 30})
        assert long["usage"]["completion_tokens"] == 30
        words = long["choices"][0]["message"]["content"].split(" ")
        stopped = await emulator.post(
            "/v1/chat/completions", {**body, "ignore_eos": True, "max_tokens": 30, "stop": [f" {words[4]}"]}
        )
        assert stopped["choices"][0]["stop_reason"] == f" {words[4]}"
        assert stopped["choices"][0]["message"]["content"] == " ".join(words[:4])


async def test_an_answer_is_cut_to_the_room_that_the_context_has(emulated: Start) -> None:
    async with emulated(blocks=9) as emulator:  # a context of 128 tokens
        answer = await emulator.complete(token_prompt(0, 100), max_tokens=90, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 28
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_several_answers_report_the_hit_of_the_last_whole_and_of_the_first_streamed(emulated: Start) -> None:
    """As vLLM does: of two answers to one cold prompt the second finds the first one's blocks."""
    async with emulated() as emulator:
        assert await emulator.cached_tokens(token_prompt(0, 40), n=2) == 32
        body = {"prompt": token_prompt(500, 40), "n": 2, "max_tokens": 1, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        async with emulator.session.post(f"{emulator.url}/v1/completions", json=body) as response:
            assert '"cached_tokens":0' in await response.text()


# -- streaming and leaving


async def test_headers_come_before_the_first_token_and_data_with_it(emulated: Start) -> None:
    async with emulated() as emulator:
        emulator.engine.sleep()
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        async with emulator.session.post(f"{emulator.url}/v1/completions", json=body) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert emulator.engine.runners[0].model.stats().waiting == 1
            emulator.engine.wake_up()
            assert (await response.content.readline()).startswith(b"data: {")
            rest = await response.text()
        assert rest.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_out_of_the_engine_at_once(emulated: Start, stream: bool) -> None:
    async with emulated(step_time=SLOW) as emulator:
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
        model = emulator.engine.runners[0].model
        asked = asyncio.create_task(emulator.session.post(f"{emulator.url}/v1/completions", json=body))
        await until(lambda: model.stats().running)
        if stream:
            (await asked).close()
        else:
            asked.cancel()
        await emulator.engine.runners[0].idle()
        assert model.stats().running == model.stats().waiting == 0
        [done] = (await emulator.get("/lab/requests"))["requests"]
        assert done["reason"] == "abort"
        assert done["output_tokens"] < 1000


async def test_a_restart_kills_what_is_under_way_with_an_error_in_the_stream(emulated: Start) -> None:
    async with emulated(step_time=SLOW) as emulator:
        body = {"prompt": WORDS, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with emulator.session.post(f"{emulator.url}/v1/completions", json=body) as response:
            await response.content.readline()
            before = await (await emulator.session.get(f"{emulator.url}/metrics")).text()
            restart = await emulator.post("/lab/restart")
            rest = await response.text()
        assert response.status == 200
        assert '"code":500' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert restart == {"epoch": 1}
        cache = (await emulator.get("/lab/cache"))["ranks"][0]
        assert (cache["live_blocks"], cache["chains"], cache["next_sequence"]) == (0, [], 0)
        after = await (await emulator.session.get(f"{emulator.url}/metrics")).text()
        assert metric(after, "process_start_time_seconds") > metric(before, "process_start_time_seconds")
        assert await emulator.cached_tokens(WORDS) == 0


async def test_health_says_503_while_the_engine_is_down(emulated: Start) -> None:
    async with emulated() as emulator:
        restart = asyncio.create_task(emulator.post("/lab/restart?down_s=0.2"))
        runner = emulator.engine.runners[0]
        await until(lambda: not runner.is_up)
        async with emulator.session.get(f"{emulator.url}/health") as response:
            assert response.status == 503
        await emulator.post("/v1/completions", {"prompt": "x"}, status=500)
        await restart
        async with emulator.session.get(f"{emulator.url}/health") as response:
            assert response.status == 200


async def test_abort_before_the_first_token_ends_the_stream_without_a_choice(emulated: Start) -> None:
    async with emulated(step_time=SLOW) as emulator:
        body = {"messages": CHAT, "stream": True}
        async with emulator.session.post(f"{emulator.url}/v1/chat/completions", json=body) as response:
            emulator.engine.abort_all()
            assert await response.text() == "data: [DONE]\n\n"


async def test_a_draining_engine_answers_new_requests_with_an_empty_stream(emulated: Start) -> None:
    async with emulated(step_time=SLOW) as emulator:
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        async with emulator.session.post(f"{emulator.url}/v1/completions", json=body) as response:
            drain = asyncio.create_task(emulator.engine.drain(timeout_s=5))
            await asyncio.sleep(0)
            async with emulator.session.post(f"{emulator.url}/v1/completions", json=body) as late:
                assert late.status == 200
                assert await late.text() == "data: [DONE]\n\n"
            assert (await response.text()).count('"finish_reason":"length"') == 1
            await drain


# -- refusals


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", {"model": "nope", "messages": CHAT}, 404, "model"),
        ("/v1/chat/completions", {"model": "tiny"}, 400, "body.messages"),
        ("/v1/chat/completions", {"messages": CHAT, "cache_salt": ""}, 400, "cache_salt"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 9000}, 400, "max_tokens"),
        ("/v1/chat/completions", {"messages": CHAT, "chat_template": "x"}, 400, None),
        ("/v1/completions", {"prompt": "word " * 5000}, 400, "input_tokens"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": [99999]}, 400, None),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "n": 2, "temperature": 0}, 400, None),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("/v1/chat/completions", {"messages": []}, 400, None),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_none"}, 404, "response_id"),
    ],
)
async def test_what_vllm_refuses_is_refused_in_its_form(
    emulated: Start, path: str, body: object, status: int, param: str | None
) -> None:
    async with emulated() as emulator:
        error = (await emulator.post(path, body, status=status))["error"]
        assert (error["code"], error["param"]) == (status, param)
        assert error["message"]
        assert error["type"]


async def test_broken_json_and_lone_surrogates_are_400_and_unknown_paths_404(emulated: Start) -> None:
    async with emulated() as emulator:
        for raw in (b"{bad", b'{"prompt":"a\\ud800"}'):
            async with emulator.session.post(f"{emulator.url}/v1/completions", data=raw) as response:
                assert response.status == 400
        async with emulator.session.get(f"{emulator.url}/nope") as response:
            assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
        async with emulator.session.get(f"{emulator.url}/v1/completions") as response:
            assert response.status == 405


async def test_a_full_queue_is_503_without_retry_after_and_counted(emulated: Start) -> None:
    changes = {"queued_requests_max": 0}
    async with emulated(engine_changes=changes) as emulator:
        async with emulator.session.post(f"{emulator.url}/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert "Retry-After" not in response.headers
        text = await (await emulator.session.get(f"{emulator.url}/metrics")).text()
        assert metric(text, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1


# -- tokens, models


async def test_tokenize_agrees_with_the_engine_and_detokenize_with_tokenize(emulated: Start) -> None:
    """The ids are what vLLM 0.32 answered for the same text and model: NFC, and digits one by one."""
    async with emulated() as emulator:
        page = await emulator.post(
            "/tokenize", {"prompt": "hello there e\u0301\n\n x 12345", "return_token_strs": True}
        )
        assert page["tokens"] == [278, 78, 343, 1539, 223, 130, 105, 201, 201, 1069, 223, 19, 20, 21, 22, 23]
        assert page["token_strs"][:4] == ["he", "l", "lo", "Ġthere"]
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
        chat = await emulator.post("/tokenize", {"messages": messages})
        expected = [1, 1612, 693, 201, 1226, 317, 369, 3350, 2, 201, 1, 2450, 201, 278, 78, 343, 1539, 2, 201]
        assert chat["tokens"] == [*expected, 1, 67, 337, 721, 1441, 201]
        back = await emulator.post("/detokenize", {"tokens": chat["tokens"]})
        assert back["prompt"].startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello there")


async def test_content_parts_and_null_content_render_as_vllm_does(emulated: Start) -> None:
    async with emulated() as emulator:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
        tokens = (await emulator.post("/tokenize", {"messages": messages}))["tokens"]
        text = (await emulator.post("/detokenize", {"tokens": tokens}))["prompt"]
        assert text == ("<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n")
        body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}]}
        body |= {"add_generation_prompt": False, "continue_final_message": True}
        tokens = (await emulator.post("/tokenize", body))["tokens"]
        assert (await emulator.post("/detokenize", {"tokens": tokens}))["prompt"].endswith("<|im_start|>assistant\nso")


async def test_lora_adapters_are_listed_with_their_parent_and_cached_apart(emulated: Start) -> None:
    async with emulated(lora_names=("a1",)) as emulator:
        models = (await emulator.get("/v1/models"))["data"]
        assert [(model["id"], model["parent"]) for model in models] == [("tiny", None), ("a1", "tiny")]
        assert await emulator.cached_tokens(WORDS) == 0
        assert await emulator.cached_tokens(WORDS, model="a1") == 0
        assert await emulator.cached_tokens(WORDS, model="a1") > 0
        assert await emulator.cached_tokens(WORDS, model="a1", cache_salt="s") == 0


async def test_big_prompts_are_tokenised_beside_the_loop_and_the_same(emulated: Start) -> None:
    vocabulary = Vocabulary()
    text = "A sentence, with 12 numbers; and more.\n" * 400 + "<|im_end|>" + WORDS
    async with emulated(blocks=2000, engine_changes={"context_tokens_max": 20000}) as emulator:
        page = await emulator.post("/tokenize", {"prompt": text})
        assert page["tokens"] == vocabulary.encode(text).tolist()
        assert page["count"] > 4000


# -- metrics


def metric(text: str, name: str, **labels: str) -> float:
    [value] = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(value)


async def test_metrics_parse_and_count_what_was_served(emulated: Start) -> None:
    async with emulated() as emulator:
        prompt = token_prompt(0, 100)
        for _ in range(2):
            await emulator.complete(prompt, max_tokens=5, ignore_eos=True)
        text = await (await emulator.session.get(f"{emulator.url}/metrics")).text()
        tiny = {"model_name": "tiny", "engine": "0"}
        assert metric(text, "vllm:prompt_tokens_total", **tiny) == 200
        assert metric(text, "vllm:generation_tokens_total", **tiny) == 10
        assert metric(text, "vllm:prefix_cache_queries_total", **tiny) == 200
        assert metric(text, "vllm:prefix_cache_hits_total", **tiny) == 96
        assert metric(text, "vllm:prompt_tokens_by_source_total", source="local_compute") == 104
        assert metric(text, "vllm:request_success_total", finished_reason="length") == 2
        assert metric(text, "vllm:time_to_first_token_seconds_count", **tiny) == 2
        assert metric(text, "vllm:num_requests_running", **tiny) == 0
        assert metric(text, "vllm:kv_cache_usage_perc", **tiny) == 0, "a full cache that nobody uses counts as empty"
        assert metric(text, "vllm:cache_config_info", block_size="16", num_gpu_blocks="512") == 1


async def test_every_metric_family_has_the_name_and_type_that_vllm_gives_it(emulated: Start) -> None:
    known = {family.name: family for family in text_string_to_metric_families(capture("metrics_before.txt"))}
    async with emulated() as emulator:
        await emulator.complete("x")
        text = await (await emulator.session.get(f"{emulator.url}/metrics")).text()
    for family in text_string_to_metric_families(text):
        assert family.name in known
        assert family.type == known[family.name].type
        assert {name for sample in family.samples for name in sample.labels} <= {
            name for sample in known[family.name].samples for name in sample.labels
        }


async def test_waiting_and_running_show_while_requests_wait_and_run(emulated: Start) -> None:
    async with emulated(step_time=SLOW, engine_changes={"requests_max": 1}) as emulator:
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with (
            emulator.session.post(f"{emulator.url}/v1/completions", json=body) as first,
            emulator.session.post(f"{emulator.url}/v1/completions", json=body),
        ):
            for _ in range(4):
                await first.content.readline()
            text = await (await emulator.session.get(f"{emulator.url}/metrics")).text()
            assert metric(text, "vllm:num_requests_running") == 1
            assert metric(text, "vllm:num_requests_waiting") == 1
            assert metric(text, "vllm:kv_cache_usage_perc") > 0


# -- KV events


async def test_events_have_the_shape_of_captured_ones(emulated: Start, consumer: Consumer) -> None:
    captured: dict[str, dict[str, set[type]]] = {}
    for name in ("pod1_sha256_int_block32.jsonl", "lora_and_salt.jsonl"):
        for line in capture(name).splitlines():
            for event in json.loads(line)["decoded"][1]:
                fields = captured.setdefault(event["type"], {})
                for field, value in event.items():
                    fields.setdefault(field, set()).add(type(value))
    async with emulated(blocks=40, lora_names=("a1",)) as emulator:
        subscription = await consumer.subscribe(emulator)
        await emulator.complete(token_prompt(0, 300))
        await emulator.complete(token_prompt(0, 300), model="a1", cache_salt="s")
        await emulator.post("/reset_prefix_cache")
        await emulator.complete(token_prompt(500, 600))
        await emulator.complete(token_prompt(1500, 600))
        messages = await subscription.up_to_now(emulator.engine)
    seen: dict[str, set[str]] = {}
    for _, (timestamp, events, rank) in messages:
        assert isinstance(timestamp, float)
        assert rank == 0
        for event in events:
            seen.setdefault(event["type"], set()).update(event)
            assert event.keys() == captured[event["type"]].keys()
            for field, value in event.items():
                assert type(value) in captured[event["type"]][field], field
    assert seen.keys() == captured.keys()
    assert [sequence for sequence, _ in messages] == list(range(len(messages)))


def follow(messages: list[tuple[int, Any]]) -> tuple[Counter[int], dict[int, tuple[int, ...]]]:
    copies: Counter[int] = Counter()
    prefixes: dict[int, tuple[int, ...]] = {}
    for _, (_, events, _) in messages:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                copies.clear()
            elif event["type"] == "BlockRemoved":
                copies.subtract(event["block_hashes"])
            else:
                before = prefixes.get(event["parent_block_hash"], ())
                size = event["block_size"]
                for index, block_hash in enumerate(event["block_hashes"]):
                    before += tuple(event["token_ids"][index * size : (index + 1) * size])
                    prefixes[block_hash] = before
                    copies[block_hash] += 1
    return +copies, prefixes


async def test_the_events_add_up_to_the_cache_that_the_debug_page_shows(emulated: Start, consumer: Consumer) -> None:
    async with emulated(blocks=60) as emulator:
        subscription = await consumer.subscribe(emulator)
        prompts = [token_prompt(start % 3 * 200, 64 + 16 * start) for start in range(12)]
        await asyncio.gather(*(emulator.complete(prompt, max_tokens=40, ignore_eos=True) for prompt in prompts))
        copies, prefixes = follow(await subscription.up_to_now(emulator.engine))
        [rank] = (await emulator.get("/lab/cache"))["ranks"]
    live = {
        block_hash: tuple(chain["tokens"][: (index + 1) * 16])
        for chain in rank["chains"]
        for index, block_hash in enumerate(chain["block_hashes"])
    }
    assert live == {block_hash: prefixes[block_hash] for block_hash in copies}
    assert rank["live_blocks"] == len(live)


async def test_a_replay_gives_what_is_kept_from_a_number_on_and_an_end_mark(
    emulated: Start, consumer: Consumer
) -> None:
    async with emulated(kv_buffer_steps=3) as emulator:
        subscription = await consumer.subscribe(emulator)
        for start in range(5):
            await emulator.complete(token_prompt(start * 50, 20))
        live = {sequence: payload for sequence, payload in await subscription.up_to_now(emulator.engine)}
        replies = await consumer.replay(emulator.events_port + 1, 0)
        assert [reply[:3] for reply in replies[:-1]] == [
            [b"", b"kv@pod@tiny", number.to_bytes(8, "big")] for number in (2, 3, 4)
        ], "older ones are gone without a word"
        assert replies[-1] == [b"", b"", b"\xff" * 8, b""]
        assert len(live) == 5
        assert len(await consumer.replay(emulator.events_port + 1, 4)) == 2


async def test_older_releases_send_arrays_and_replays_without_a_topic(emulated: Start, consumer: Consumer) -> None:
    async with emulated(kv_encoding="array", blocks=20) as emulator:
        subscription = await consumer.subscribe(emulator)
        await emulator.complete(token_prompt(0, 280))
        await emulator.complete(token_prompt(900, 280))
        await emulator.post("/lab/reset_prefix_cache")
        await emulator.complete(token_prompt(0, 20))
        events = [event for _, (_, events, _) in await subscription.up_to_now(emulator.engine) for event in events]
        assert {(event[0], len(event)) for event in events} == {
            ("BlockStored", 12),
            ("BlockRemoved", 4),
            ("AllBlocksCleared", 1),
        }
        replies = await consumer.replay(emulator.events_port + 1, 2)
        assert [len(reply) for reply in replies] == [3, 3]
        async with emulator.session.get(f"{emulator.url}/kv_event_sources") as response:
            assert response.status == 404


async def test_lost_batches_leave_a_gap_that_a_replay_fills(emulated: Start, consumer: Consumer) -> None:
    async with emulated() as emulator:
        subscription = await consumer.subscribe(emulator)
        await emulator.complete(token_prompt(0, 20))
        await emulator.post("/lab/lose_events?batches=2")
        for start in range(1, 4):
            await emulator.complete(token_prompt(start * 50, 20))
        assert [sequence for sequence, _ in await subscription.up_to_now(emulator.engine)] == [0, 3]
        assert len(await consumer.replay(emulator.events_port + 1, 1)) == 4


async def test_a_restart_numbers_from_zero_again_without_a_mark(emulated: Start, consumer: Consumer) -> None:
    async with emulated() as emulator:
        subscription = await consumer.subscribe(emulator)
        await emulator.complete(token_prompt(0, 20))
        await emulator.complete(token_prompt(50, 20))
        await emulator.post("/lab/restart")
        await emulator.complete(token_prompt(0, 20))
        messages = [await subscription.next() for _ in range(3)]
        assert [sequence for _, sequence, _ in messages] == [0, 1, 0]
        assert messages[0][2][1][0]["block_hashes"] == messages[2][2][1][0]["block_hashes"], "hashes are deterministic"


async def test_a_sleeping_engine_says_nothing_and_clears_when_it_wakes(emulated: Start, consumer: Consumer) -> None:
    async with emulated() as emulator:
        subscription = await consumer.subscribe(emulator)
        await emulator.complete(token_prompt(0, 20))
        await emulator.post("/lab/sleep")
        assert await emulator.get("/is_sleeping") == {"is_sleeping": True}
        text = await (await emulator.session.get(f"{emulator.url}/metrics")).text()
        assert metric(text, "vllm:engine_sleep_state", sleep_state="awake") == 0
        assert emulator.engine.runners[0].publisher is not None
        assert emulator.engine.runners[0].publisher.log.next_sequence == 1
        await emulator.post("/wake_up")
        assert await emulator.cached_tokens(token_prompt(0, 20)) == 0
        messages = await subscription.up_to_now(emulator.engine)
        assert [event["type"] for event in messages[-1][1][1]] == ["AllBlocksCleared", "BlockStored"]


async def test_sleep_aborts_what_is_running_and_requests_wait_for_the_waking(emulated: Start) -> None:
    async with emulated(step_time=SLOW) as emulator:
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with emulator.session.post(f"{emulator.url}/v1/completions", json=body) as response:
            await response.content.readline()
            await emulator.post("/sleep?level=1")
            assert '"finish_reason":"abort"' in await response.text()
        waiting = asyncio.create_task(emulator.cached_tokens("x"))
        model = emulator.engine.runners[0].model
        await until(lambda: model.stats().waiting)
        await emulator.post("/wake_up")
        assert await waiting == 0


async def test_data_parallel_ranks_have_their_own_cache_ports_and_labels(emulated: Start, consumer: Consumer) -> None:
    async with emulated(ranks=2) as emulator:
        subscriptions = [await consumer.subscribe(emulator, rank) for rank in range(2)]
        prompt = token_prompt(0, 40)
        body = {"prompt": prompt, "max_tokens": 1}
        for rank in ("0", "1", "1"):
            await emulator.post("/v1/completions", body, X_data_parallel_rank=rank)
        for rank, subscription in enumerate(subscriptions):
            _, _, (_, events, dp_rank) = await subscription.next()
            assert dp_rank == rank
            assert events[0]["token_ids"] == prompt[:32]
        sources = await emulator.get("/kv_event_sources")
        assert [source["endpoint"] for source in sources.values()] == [
            f"tcp://*:{emulator.events_port}",
            f"tcp://*:{emulator.events_port + 1}",
        ]
        text = await (await emulator.session.get(f"{emulator.url}/metrics")).text()
        assert metric(text, "vllm:prompt_tokens_total", engine="0") == 40
        assert metric(text, "vllm:prompt_tokens_total", engine="1") == 80
        assert metric(text, "vllm:prefix_cache_hits_total", engine="1") == 32
        error = await emulator.post("/v1/completions", body, status=400, X_data_parallel_rank="2")
        assert error["error"]["message"] == "data_parallel_rank 2 is out of range [0, 2)."
        spread = await asyncio.gather(*(emulator.post("/v1/completions", body) for _ in range(8)))
        assert len(spread) == 8
        served = Counter(done["rank"] for done in (await emulator.get("/lab/requests"))["requests"])
        assert served[0] > 1
        assert served[1] > 2


async def test_without_a_wildcard_the_engine_connects_and_the_consumer_binds(
    emulated: Start, consumer: Consumer
) -> None:
    subscription, port = consumer.bind()
    async with emulated(kv_events_endpoint=f"tcp://127.0.0.1:{port}") as emulator:
        publisher = emulator.engine.runners[0].publisher
        assert publisher is not None
        received = asyncio.create_task(subscription.next())  # a bound SUB subscribes only while it is being read
        await until(lambda: publisher.subscriptions)
        await emulator.complete(token_prompt(0, 20))
        assert (await received)[0] == b"kv@pod@tiny"


# -- virtual and real time


async def test_a_real_run_ends_in_the_state_of_the_virtual_one(emulated: Start) -> None:
    """The same requests one after another, over HTTP and in the bare model: same hits, same cache."""
    prompts = [token_prompt(number % 4 * 300, 100 + 30 * number) for number in range(10)]
    async with emulated(blocks=60) as emulator:
        real = [await emulator.cached_tokens(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts]
        model = emulator.engine.runners[0].model
        virtual_model = EngineModel(model.settings, model.step_time)
        virtual, now_s = [], 0.0
        for number, prompt in enumerate(prompts):
            answers = emulator.engine.speaker.answer(prompt, Wishes(tokens_max=20, ignore_eos=True))
            request = EngineRequest(request_id=str(number), prompt=prompt, output=answers.tokens)
            assert virtual_model.add(request, now_s) is None
            while virtual_model.has_work:
                outcome = virtual_model.step(now_s)
                assert outcome is not None
                now_s = outcome.ended_s
                virtual += [done.cached_tokens for done in outcome.finished]
        assert real == virtual
        assert model.cached_copies() == virtual_model.cached_copies()


async def test_clients_of_both_kinds_share_one_engine(emulated: Start) -> None:
    async with emulated() as emulator, aiohttp.ClientSession() as other:
        bodies = [{"prompt": f"{number} {WORDS}", "max_tokens": 8, "stream": True} for number in range(6)]
        streams = [other.post(f"{emulator.url}/v1/completions", json=body) for body in bodies]
        texts = [await (await stream).text() for stream in streams]
        assert all(text.count("data: ") == 9 for text in texts)
