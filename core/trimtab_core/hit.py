"""A hit: slots that hold the same length of a prompt.

The one rule: in a list of hits no slot appears twice. Slots with no hit are in none.
"""

from typing import NamedTuple

from trimtab_core.chunk_owners import Slots


class Hit(NamedTuple):
    """`slots` hold the prompt's first `depth` chunks, `tokens` tokens up to there."""

    depth: int
    tokens: int
    slots: Slots


def all_slots(hits: list[Hit]) -> Slots:
    """Every slot with a hit."""
    slots = 0
    for hit in hits:
        slots |= hit.slots
    return slots


def deeper(hits: list[Hit], others: list[Hit]) -> list[Hit]:
    """For each slot the deeper of its two hits; where that is the other's, never fewer tokens than before."""
    for other in others:
        left = other.slots
        merged: list[Hit] = []
        for hit in hits:
            both = hit.slots & left
            left ^= both
            if both and other.depth > hit.depth:
                merged.append(Hit(other.depth, max(other.tokens, hit.tokens), both))
                if hit.slots != both:
                    merged.append(Hit(hit.depth, hit.tokens, hit.slots ^ both))
            else:
                merged.append(hit)
        if left:
            merged.append(Hit(other.depth, other.tokens, left))
        hits = merged
    return hits
