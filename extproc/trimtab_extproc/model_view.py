"""The pool for one model name: who may be chosen, and how each of them renders a prompt.

The one rule: a candidate is in the control document, does not say that it cannot serve, and serves the model that is
asked for. An endpoint without a heartbeat stays a candidate, in approximate mode: what it holds is learned from what
was sent there, so that a pool without sidecars keeps its conversations together too. A model that nobody lists leaves
every endpoint a candidate: the engine says that it does not know it. Pure: the same input gives the same view.

Bounds: `VARIANTS_MAX` distinct renderings among the candidates; endpoints beyond are routed by load.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from trimtab_core.model_card import ModelCard
from trimtab_core.placement import I8, Bools
from trimtab_extproc.endpoint_table import Endpoint
from trimtab_state import Heartbeat, ServedModel

VARIANTS_MAX = 16
TOKENS_PER_BYTE_DEFAULT = 0.25
RATE_MAX = 16.0
"""Nobody has more tokens per byte."""
"""Where no card says: four bytes a token, usual for English."""
UNKNOWN_MODEL = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to render a prompt: a card (None: the request's own canonical text) and the LoRA adapter, if any."""

    digest: str | None
    card: ModelCard | None
    lora_name: str | None

    @property
    def key(self) -> tuple[str | None, str | None]:
        """Equal keys render equally."""
        return self.digest, self.lora_name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelView:
    """The pool for one model name; arrays over slots."""

    candidates: Bools
    excluded: Mapping[int, str]
    """Members that are no candidates, and why: "draining" | "asleep" | "unreachable" | "another model"."""
    variants: tuple[Variant, ...]
    variant_of_slot: I8
    """Index into `variants`; -1: routed by load alone."""
    exact: Bools
    approximate_reasons: Mapping[int, str]
    """Why a slot is not exact: "no_heartbeat" | "secret" | "no_card" | "card" | "engine" | "too_many_cards"."""
    tokens_per_byte: float
    model_label: str
    """The model's name if an endpoint lists it, "unknown" if not: safe as a metric's label."""


def build_view(
    model: str | None,
    *,
    members: Sequence[Endpoint],
    draining: Set[str],
    heartbeats: Mapping[str, Heartbeat],
    cards: Mapping[str, ModelCard],
    slot_count: int,
    seed_digest: str = "",
) -> ModelView:
    """The view for `model` (None: the engine's default). `draining`: names of members that the operator takes out.

    `seed_digest`: of our own hashes; empty: sidecars are taken to have the same. Of one that has another secret, no
    hash is ever one of ours.
    """
    excluded: dict[int, str] = {}
    listing: list[Endpoint] = []
    silent: list[Endpoint] = []
    others: list[Endpoint] = []
    for endpoint in members:
        heartbeat = heartbeats.get(endpoint.name)
        if endpoint.name in draining:
            excluded[endpoint.slot] = "draining"
        elif heartbeat is not None and heartbeat.state != "serving":
            excluded[endpoint.slot] = heartbeat.state
        elif heartbeat is None or not heartbeat.models:
            silent.append(endpoint)
        elif model in heartbeat.models:
            listing.append(endpoint)
        else:
            others.append(endpoint)
    if listing:
        excluded |= {endpoint.slot: "another model" for endpoint in others}
        candidates = [*listing, *silent]
    else:
        candidates = [*silent, *others]

    is_candidate, exact = np.zeros(slot_count, dtype=np.bool_), np.zeros(slot_count, dtype=np.bool_)
    variant_of_slot = np.full(slot_count, -1, dtype=np.int8)
    variants: dict[tuple[str | None, str | None], Variant] = {}
    indices: dict[tuple[str | None, str | None], int] = {}
    reasons: dict[int, str] = {}
    for endpoint in candidates:
        is_candidate[endpoint.slot] = True
        heartbeat = heartbeats.get(endpoint.name)
        variant, reason = _rendering(heartbeat, model, cards)
        if heartbeat is not None and seed_digest and heartbeat.seed_digest not in ("", seed_digest):
            reason = "secret"
        if variant.key not in indices and len(variants) < VARIANTS_MAX:
            indices[variant.key] = len(variants)
            variants[variant.key] = variant
        index = indices.get(variant.key)
        if index is None:
            reason = "too_many_cards"
        else:
            variant_of_slot[endpoint.slot] = index
        if reason is None:
            exact[endpoint.slot] = True
        else:
            reasons[endpoint.slot] = reason
    rates = _tokens_per_byte([heartbeats[e.name] for e in candidates if e.name in heartbeats], model, cards)
    return ModelView(
        candidates=is_candidate,
        excluded=excluded,
        variants=tuple(variants.values()),
        variant_of_slot=variant_of_slot,
        exact=exact,
        approximate_reasons=reasons,
        tokens_per_byte=sum(rates) / len(rates) if rates else TOKENS_PER_BYTE_DEFAULT,
        model_label=model if listing and model is not None else UNKNOWN_MODEL,
    )


def _rendering(
    heartbeat: Heartbeat | None, model: str | None, cards: Mapping[str, ModelCard]
) -> tuple[Variant, str | None]:
    """How an endpoint renders the model's prompts, and why that is not exact (None: it is)."""
    if heartbeat is None:
        return Variant(digest=None, card=None, lora_name=None), "no_heartbeat"
    served = _served(heartbeat, model)
    lora_name = model if served.lora else None
    card = cards.get(served.card) if served.card is not None else None
    if card is None or not card.exact:
        return Variant(digest=None, card=None, lora_name=lora_name), "no_card" if card is None else "card"
    variant = Variant(digest=served.card, card=card, lora_name=lora_name)
    return variant, None if heartbeat.approximate is None else "engine"


def _tokens_per_byte(heartbeats: Sequence[Heartbeat], model: str | None, cards: Mapping[str, ModelCard]) -> list[float]:
    """What the candidates' sidecars have measured. Before any has: the rate of each distinct card among the candidates
    (those of cards that are not exact are as good), which is of a sample text."""
    measured = [heartbeat.tokens_per_byte for heartbeat in heartbeats if 0 < heartbeat.tokens_per_byte < RATE_MAX]
    if measured:
        return measured
    digests = {served.card for heartbeat in heartbeats if (served := _served(heartbeat, model)).card in cards}
    return [cards[digest].tokens_per_byte for digest in sorted(digest for digest in digests if digest is not None)]


def _served(heartbeat: Heartbeat, model: str | None) -> ServedModel:
    """What the endpoint serves under that name; for its default, or a name that it does not list, its base model."""
    if model is not None and model in heartbeat.models:
        return heartbeat.models[model]
    return next((entry for entry in heartbeat.models.values() if not entry.lora), ServedModel())
