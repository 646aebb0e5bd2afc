"""What the status says of the store: whether operator and pickers reach it, and whether it keeps what is written.

The one rule: as of all conditions: a reason for programs, what was found, and what mends it. Pure.
"""

from trimtab_operator.report.conditions import Finding
from trimtab_operator.report.pool_facts import PoolFacts
from trimtab_operator.report.rollout import is_starting, replicas
from trimtab_operator.report.wording import sentence, so_many_are
from trimtab_operator.store.eviction import FIELD, SAFE


def store_reachable(facts: PoolFacts) -> Finding:
    error = facts.fleet.store_error if facts.fleet is not None else ""
    if error:
        return (
            "False",
            "StoreUnavailable",
            f"The store{f' ({facts.store_address})' if facts.store_address else ''} does not answer as it should:"
            f" {sentence(error)} Routing goes on with what the pickers know; changes wait until the store is back.",
        )
    if facts.store_problem:
        return "False", "NoAccess", sentence(facts.store_problem)
    if facts.fleet is None:
        return "Unknown", "NotReadYet", "The store has not been read yet."
    connected, (ready, total) = facts.fleet.pickers, replicas(facts.picker)
    if total and not connected:
        text = f"The store answers, but {_none_of(total)} connected: see Ready, and the pickers' logs."
        if facts.picker is not None and not ready and is_starting(facts.picker):
            return "Unknown", "NoPickerConnected", text
        return "False", "NoPickerConnected", " ".join([text, *facts.store_notes])
    if not facts.is_own_store_user:
        return "True", "SharedLogin", " ".join(["The pool has a copy of the operator's own login.", *facts.store_notes])
    answers = f"The store answers; {so_many_are(connected, 'picker')} connected."
    if connected < total:
        answers = f"The store answers; of {total} pickers {connected} connected: see the logs of the others."
    return "True", "StoreReachable", " ".join([answers, *facts.store_notes])


def store_keeps_keys(facts: PoolFacts) -> Finding:
    return (
        "False",
        "Evicts",
        f"The store's {FIELD} is {facts.store_evicts}: when its memory is full it throws away what operator, pickers"
        f" and sidecars have written, and the pool loses endpoints and what is known of caches. CONFIG SET {FIELD}"
        f" {SAFE}, and the same in the server's configuration (of a hosted store: in its parameters).",
    )


def _none_of(total: int) -> str:
    return "the only picker is not" if total == 1 else f"none of {total} pickers is"
