"""What an emulated model says: tokens fixed by the prompt, so that a run repeats and a chat can go on from its answers.

The one rule: the same prompt, seed and wishes give the same answer, and the answer's text tokenises back to the very
tokens it was made of, so an engine that gets it in the next turn finds the blocks of this one.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from trimtab_lab.engine_request import FinishReason
from trimtab_lab.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a request says about its answer."""

    tokens_max: int
    tokens_min: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text that each token adds; empty for the end-of-turn token and for what a stop string cut off."""
    finish_reason: FinishReason
    stop_reason: str | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Speaker:
    """Makes answers out of the vocabulary's plain words."""

    def __init__(self, vocabulary: Vocabulary, *, tokens_min: int = 64, tokens_max: int = 512) -> None:
        """An answer that nobody cuts short is `tokens_min` to `tokens_max` tokens long, its end-of-turn included."""
        if not 1 <= tokens_min <= tokens_max:
            raise ValueError("an answer needs 1 <= tokens_min <= tokens_max")
        self._eos_id = vocabulary.eos_id
        self._words = [(token, vocabulary.decode([token])) for token in vocabulary.plain_words()]
        self._tokens_min = tokens_min
        self._tokens_max = tokens_max

    def answer(self, prompt: Sequence[int], wishes: Wishes, *, choice: int = 0) -> Answer:
        """The answer to a prompt; `choice` tells apart several to the same one."""
        digest = blake2b(digest_size=16)
        digest.update(f"{wishes.seed}/{choice}/".encode())
        digest.update(array("I", prompt).tobytes())
        rng = random.Random(digest.digest())
        natural = max(rng.randint(self._tokens_min, self._tokens_max), wishes.tokens_min)
        ends = not wishes.ignore_eos and natural <= wishes.tokens_max
        count = natural if ends else wishes.tokens_max
        words = rng.choices(self._words, k=count)
        tokens = [token for token, _ in words]
        pieces = [piece for _, piece in words]
        reason, stop_reason = FinishReason.LENGTH, None
        if ends:
            tokens[-1], pieces[-1] = self._eos_id, ""
            reason = FinishReason.STOP
        if wishes.stop:
            cut = _first_stop("".join(pieces), wishes.stop)
            if cut is not None:
                at, stop_reason = cut
                tokens, pieces = _cut_off(tokens, pieces, at, len(stop_reason))
                reason = FinishReason.STOP
        return Answer(tokens=tuple(tokens), pieces=tuple(pieces), finish_reason=reason, stop_reason=stop_reason)


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    return min(found) if found else None


def _cut_off(tokens: list[int], pieces: list[str], at: int, stop_chars: int) -> tuple[list[int], list[str]]:
    """Tokens up to the one that completes the stop string at `at`, with the text before it."""
    length, kept = 0, []
    for piece in pieces:
        kept.append(piece[: max(at - length, 0)])
        length += len(piece)
        if length >= at + stop_chars:
            break
    return tokens[: len(kept)], kept
