"""The shared state of a pool in a Redis-compatible store: keys, codecs, logs, snapshots, leases, documents.

Its one rule: the store is never on a request's path. Writers enqueue and a task sends; readers follow and keep
everything in memory. It decides nothing about placement, and knows no Envoy, engine or Kubernetes.
"""

from .alarms import AgedAlarm, AlarmReader, AlarmWriter
from .control_writer import ControlWriter
from .documents import Alarm, ControlDocument, EndpointSpec, Heartbeat, Policy, ServedModel
from .errors import CodecError, ConfigError, StateError, StateUnavailable
from .keys import PoolKeys
from .kv_publisher import KvPublisher
from .load_publisher import LoadPublisher, OpenReservation
from .pool_follower import PoolFollower
from .response_map import ResponseMap
from .settings import StateSettings
from .sink import PoolSink
from .store import Store, connect

__all__ = [
    "AgedAlarm",
    "Alarm",
    "AlarmReader",
    "AlarmWriter",
    "CodecError",
    "ConfigError",
    "ControlDocument",
    "ControlWriter",
    "EndpointSpec",
    "Heartbeat",
    "KvPublisher",
    "LoadPublisher",
    "OpenReservation",
    "Policy",
    "PoolFollower",
    "PoolKeys",
    "PoolSink",
    "ResponseMap",
    "ServedModel",
    "StateError",
    "StateSettings",
    "StateUnavailable",
    "Store",
    "connect",
]
