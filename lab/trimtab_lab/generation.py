"""One HTTP request's work in the engine: prompts tokenised, one engine request for each answer, answers as text.

The one rule: whoever starts a generation closes it, and closing takes whatever is unfinished out of the engine at once.
"""

import asyncio
import uuid
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from trimtab_lab.answer import Answer, Speaker, Wishes
from trimtab_lab.engine_request import EngineRequest, FinishReason, Refusal
from trimtab_lab.engine_runner import EngineRunner, TokenStream
from trimtab_lab.request_body import BadRequestError, InferenceRequest
from trimtab_lab.token_chain import LoraAdapter
from trimtab_lab.vocabulary import UnusableTextError, Vocabulary

INLINE_CHARS_MAX = 8192
"""Text up to this length is tokenised on the event loop (some 4 ms); more goes to a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one answer gained since the last time."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | None


@dataclass(slots=True, eq=False)
class _Choice:
    index: int
    prompt: "array[int]"
    answer: Answer
    stream: TokenStream
    shown: int = 0
    is_over: bool = False


async def tokenise(request: InferenceRequest, vocabulary: Vocabulary, *, context_tokens_max: int) -> "list[array[int]]":
    """The tokens of each prompt. Raises BadRequestError for text or ids that the engine refuses."""
    prompts = []
    for prompt in request.prompts:
        if isinstance(prompt, tuple):
            if any(not 0 <= token < vocabulary.size for token in prompt):
                raise BadRequestError(f"Token id {max(prompt)} is out of vocabulary")
            tokens = array("I", prompt)
        else:
            tokens = await tokenise_text(prompt, vocabulary)
        if not tokens:
            raise BadRequestError(
                "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", param="prompt"
            )
        room = context_tokens_max - (request.api != "embedding")
        if len(tokens) > room:
            # Of a text, the engine's tokenizer looks at one token more than fits.
            found = len(tokens) if isinstance(prompt, tuple) else room + 1
            raise BadRequestError(
                f"This model's maximum context length is {context_tokens_max} tokens. However, your prompt contains "
                f"{'at least ' if found == room + 1 else ''}{found} input tokens, which exceeds this limit even "
                f"without any output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={found})",
                param="input_tokens",
            )
        prompts.append(tokens)
    return prompts


async def tokenise_text(text: str, vocabulary: Vocabulary) -> "array[int]":
    """Tokens of a text, long ones made beside the event loop. Raises BadRequestError."""
    try:
        parts = vocabulary.unknown_parts(text)
        if sum(map(len, parts)) > INLINE_CHARS_MAX:
            loop = asyncio.get_running_loop()
            vocabulary.learn(parts, await loop.run_in_executor(None, vocabulary.tokenise_parts, parts))
        return vocabulary.encode(text)
    except UnusableTextError as error:
        raise BadRequestError(str(error)) from error


def answer_tokens_max(request: InferenceRequest, prompt_tokens: int, *, context_tokens_max: int) -> int:
    """How long an answer may be: as long as wanted, or as the context has room. Raises BadRequestError."""
    wanted, room = request.tokens_max, context_tokens_max - prompt_tokens
    if wanted is None:
        return room
    if wanted > context_tokens_max:
        raise BadRequestError(
            f"max_tokens={wanted} cannot be greater than max_model_len={context_tokens_max}. Please request fewer "
            f"output tokens. (parameter=max_tokens, value={wanted})",
            param="max_tokens",
        )
    if wanted < 1:
        raise BadRequestError(
            f"max_tokens must be at least 1, got {wanted}. (parameter=max_tokens, value={wanted})", param="max_tokens"
        )
    return min(wanted, room)


class Generation:
    """Answers under way. Open it, read `deltas()` to the end, close it in any case."""

    def __init__(self, request: InferenceRequest, prompts: "Sequence[array[int]]", *, reply_id: str) -> None:
        self.request = request
        self.prompts = prompts
        self.reply_id = reply_id
        self.first_cached_tokens = 0
        """Prompt tokens found cached by the first request that got a token: what a stream reports."""
        self.last_cached_tokens = 0
        """The same of the last request: what a whole answer reports."""
        self.output_tokens = 0
        self._choices: list[_Choice] = []
        self._news = asyncio.Event()
        self._runner: EngineRunner | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def cached_tokens(self) -> int:
        """What the answer's usage says."""
        return self.first_cached_tokens if self.request.stream else self.last_cached_tokens

    @property
    def choice_count(self) -> int:
        return len(self.prompts) * self.request.choices

    def open(self, runner: EngineRunner, speaker: Speaker, lora: LoraAdapter | None) -> None:
        """Hand everything to the engine. Raises BadRequestError if it refuses, with nothing left behind."""
        request, limit = self.request, runner.model.settings.context_tokens_max
        self._runner = runner
        for prompt_index, prompt in enumerate(self.prompts):
            wishes = Wishes(
                tokens_max=answer_tokens_max(request, len(prompt), context_tokens_max=limit),
                tokens_min=request.tokens_min,
                ignore_eos=request.ignore_eos,
                stop=request.stop,
                seed=request.seed,
            )
            for number in range(request.choices):
                index = prompt_index * request.choices + number
                answer = speaker.answer(prompt, wishes, choice=number)
                engine_request = EngineRequest(
                    # As vLLM does: a client may send the same request id twice.
                    request_id=f"{self.reply_id}-{index}-{uuid.uuid4().hex[:8]}",
                    prompt=prompt,
                    output=answer.tokens,
                    finish_reason=answer.finish_reason,
                    lora=lora,
                    cache_salt=request.cache_salt,
                    reads_cache=request.reads_cache,
                )
                stream = runner.submit(engine_request, self._news)
                if isinstance(stream, Refusal):
                    self.close()
                    raise _refused(stream)
                self._choices.append(_Choice(index=index, prompt=prompt, answer=answer, stream=stream))

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What came since the last time, until all answers are complete. Raises EngineDiedError."""
        while any(not choice.is_over for choice in self._choices):
            news = [delta for choice in self._choices if not choice.is_over for delta in self._take(choice)]
            if news:
                yield news
            elif any(not choice.is_over for choice in self._choices):
                self._news.clear()
                await self._news.wait()

    def close(self) -> None:
        """Out of the engine with whatever is unfinished. Harmless when all is done."""
        for choice in self._choices:
            if choice.stream.finished is None and self._runner is not None:
                self._runner.abort(choice.stream.request_id)

    def _take(self, choice: _Choice) -> list[Delta]:
        tokens = choice.stream.take()
        finished = choice.stream.finished
        if not tokens and finished is None:
            return []
        if tokens and self.output_tokens == 0:
            self.first_cached_tokens = tokens[0].cached_tokens
        if tokens and choice.index == self.choice_count - 1:
            self.last_cached_tokens = tokens[0].cached_tokens
        end = choice.shown + len(tokens)
        text = "".join(choice.answer.pieces[choice.shown : end])
        choice.shown = end
        self.output_tokens += len(tokens)
        choice.is_over = finished is not None
        return [
            Delta(
                index=choice.index,
                text=text,
                token_ids=[token.token for token in tokens],
                finish_reason=None if finished is None else finished.reason,
                stop_reason=choice.answer.stop_reason if finished and finished.reason is FinishReason.STOP else None,
            )
        ]


def _refused(refusal: Refusal) -> BadRequestError:
    if refusal is Refusal.QUEUE_FULL:
        return BadRequestError("The engine's queue is full.", status=503, kind="ServiceUnavailableError")
    if refusal is Refusal.DUPLICATE:
        return BadRequestError("A request with this id is running already.")
    return BadRequestError("The request exceeds the model's context.", param="input_tokens")
