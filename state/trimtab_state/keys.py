"""The names of a pool's keys.

The one rule: all keys of a pool share one hash tag, so that they are in one slot of a cluster and one transaction can
write several of them. Names depend on the pool's namespace and name alone: a pool that is deleted and made again finds
its sidecars still writing to the right place.
"""

import hashlib
from dataclasses import dataclass

from .errors import ConfigError

RESPONSE_ID_CHARS_MAX = 128
"""A longer response id (a client may choose any) is named by its digest."""


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """Keys of the pool `namespace/name`. Raises ConfigError for names that Kubernetes would refuse too."""

    namespace: str
    name: str

    def __post_init__(self) -> None:
        for field, value in (("namespace", self.namespace), ("name", self.name)):
            if not value or any(c in "{}/:" or c.isspace() for c in value):
                raise ConfigError(f"pool {field} {value!r} is not a Kubernetes name")

    @property
    def prefix(self) -> str:
        """`trimtab:{namespace/name}:`, the prefix of every key, and of the pattern in the pool's ACL."""
        return f"trimtab:{{{self.namespace}/{self.name}}}:"

    @property
    def control(self) -> str:
        """Value: the control document."""
        return self.prefix + "control"

    @property
    def generation(self) -> str:
        """Value: a random name of the store's contents; another one, or none, means that the contents were lost."""
        return self.prefix + "generation"

    @property
    def notify(self) -> str:
        """Stream: what changed outside the logs."""
        return self.prefix + "notify"

    @property
    def kv_log(self) -> str:
        """Stream: chunk changes of all endpoints."""
        return self.prefix + "kv_log"

    @property
    def load_log(self) -> str:
        """Stream: load operations of all replicas."""
        return self.prefix + "load_log"

    @property
    def alarms(self) -> str:
        """Stream: hotspot alarms."""
        return self.prefix + "alarms"

    @property
    def endpoints(self) -> str:
        """Set: names of the endpoints that send heartbeats."""
        return self.prefix + "endpoints"

    @property
    def replicas(self) -> str:
        """Set: incarnations (16 hex digits) of the replicas that hold leases."""
        return self.prefix + "replicas"

    @property
    def snapshot_wanted(self) -> str:
        """Set: names of the endpoints whose snapshot a follower needs now."""
        return self.prefix + "snapshot_wanted"

    @property
    def response_order(self) -> str:
        """List: keys of the responses, oldest first, which bounds their number."""
        return self.prefix + "responses"

    def kv_snapshot(self, endpoint: str) -> str:
        """Value: all chunks of an endpoint."""
        return f"{self.prefix}kv_snapshot:{endpoint}"

    def heartbeat(self, endpoint: str) -> str:
        """Value: the last heartbeat of an endpoint."""
        return f"{self.prefix}heartbeat:{endpoint}"

    def replica(self, incarnation: int) -> str:
        """Value: the lease of a replica incarnation, with its open reservations."""
        return f"{self.prefix}replica:{incarnation:016x}"

    def card(self, digest: str) -> str:
        """Value: a model card."""
        return f"{self.prefix}card:{digest}"

    def response(self, response_id: str) -> str:
        """Value: the endpoint that holds the state of a response."""
        if len(response_id) > RESPONSE_ID_CHARS_MAX:
            digest = hashlib.sha256(response_id.encode("utf-8", "surrogatepass")).hexdigest()
            return f"{self.prefix}response:sha256:{digest}"
        return f"{self.prefix}response:{response_id}"
