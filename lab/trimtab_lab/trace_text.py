"""Text for a trace that has none: each block id stands for one fixed message, and a prompt is the chat of its messages.

The one rule: equal leading block ids give equal leading text, of the length that the trace says, counted by the tiny
model's tokenizer with the chat template around it. The text is made up from the id alone.
"""

import random
from collections import OrderedDict
from typing import Any

from trimtab_lab.trace import TraceRequest
from trimtab_lab.vocabulary import Vocabulary

MESSAGES_KEPT = 4096
"""Messages remembered; more are made again."""
SENTENCE_WORDS = (6, 18)


class TraceText:
    """Chats for the requests of a trace."""

    def __init__(self, vocabulary: Vocabulary, *, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._words = [vocabulary.decode([token]) for token in vocabulary.plain_words()]
        self._around = {role: self._tokens_around(role) for role in ("system", "user", "assistant")}
        empty = vocabulary.render_chat([], add_generation_prompt=True)
        self._prompt_end_tokens = len(vocabulary.encode(empty))
        self._kept: OrderedDict[tuple[int, str, int], str] = OrderedDict()

    def messages(self, request: TraceRequest) -> list[dict[str, Any]]:
        """The chat: the first block is the system message, the last one the user's; in between they take turns.

        A message of one token or none is left with one word, so very short blocks come out a little long.
        """
        last = len(request.block_ids) - 1
        messages = []
        for position, block_id in enumerate(request.block_ids):
            is_last = position == last
            role = "user" if is_last or position % 2 else "assistant"
            if position == 0 and not is_last:
                role = "system"
            tokens = request.last_block_tokens - self._prompt_end_tokens if is_last else request.block_tokens
            messages.append({"role": role, "content": self._content(block_id, role, tokens - self._around[role])})
        return messages

    def prompt(self, request: TraceRequest) -> str:
        """The same chat as the engine's prompt."""
        return self._vocabulary.render_chat(self.messages(request), add_generation_prompt=True)

    def _content(self, block_id: int, role: str, tokens: int) -> str:
        key = (block_id, role, tokens)
        known = self._kept.get(key)
        if known is not None:
            self._kept.move_to_end(key)
            return known
        content = self._made_up(random.Random(f"{self._seed}/{block_id}/{role}"), max(tokens, 1))
        self._kept[key] = content
        if len(self._kept) > MESSAGES_KEPT:
            self._kept.popitem(last=False)
        return content

    def _made_up(self, rng: random.Random, tokens: int) -> str:
        """Sentences of `tokens` tokens: each word and each full stop is one."""
        pieces: list[str] = []
        until_stop = rng.randint(*SENTENCE_WORDS)
        while len(pieces) < tokens:
            if until_stop:
                pieces.append(rng.choice(self._words))
                until_stop -= 1
            else:
                pieces.append(".")
                until_stop = rng.randint(*SENTENCE_WORDS)
        return "".join(pieces)

    def _tokens_around(self, role: str) -> int:
        """Tokens that the template puts around one message of a role."""
        render, count = self._vocabulary.render_chat, self._vocabulary.encode
        word = self._words[0]
        one = render([{"role": role, "content": word}], add_generation_prompt=False)
        return len(count(one)) - 1
