"""The store's user of one pool: what it is called and what it may do.

The one rule: exactly what pickers and sidecars send, on exactly this pool's keys. The tests run both under this user
and ask for everything else in vain, so a command that `trimtab_state` begins to use has to be added here.
"""

import hashlib
from typing import Final

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.store_secret import USER_PREFIX
from trimtab_state import PoolKeys

KEY_COMMANDS: Final = (
    *("get", "mget", "getrange", "set", "del", "pexpire"),
    *("sadd", "srem", "smembers", "sismember"),
    *("rpush", "lpop"),
    *("xadd", "xread", "xrevrange"),
)
"""All of them name keys, and so are bound to the pool's."""
CONNECTION_COMMANDS: Final = (
    *("multi", "exec", "ping", "select", "client|setname"),
    # What a client has to ask a cluster.
    *("command", "cluster|slots", "asking"),
)
OPTIONAL_COMMANDS: Final = ("client|setinfo",)
"""Since Redis 7.2; the client sends it and does not mind a refusal, which the server would log each time, though."""


def user_name(key: PoolKey) -> str:
    """A namespace has no dots, so no two pools share a name."""
    return f"{USER_PREFIX}{key.namespace}.{key.name}"


def user_rules(key: PoolKey, password: str, *, with_optional: bool = True) -> tuple[str, ...]:
    """Arguments of `ACL SETUSER` after the name: the whole user, whatever it was before."""
    commands = [*KEY_COMMANDS, *CONNECTION_COMMANDS, *(OPTIONAL_COMMANDS if with_optional else ())]
    prefix = "".join(f"\\{c}" if c in "*?[]\\" else c for c in PoolKeys(key.namespace, key.name).prefix)
    return (
        "reset",
        "on",
        # The hash, so that no log of the server and no listener on it sees the password.
        f"#{hashlib.sha256(password.encode()).hexdigest()}",
        f"~{prefix}*",
        *(f"+{command}" for command in commands),
    )
