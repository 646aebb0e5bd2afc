"""The `drain` subcommand, run as the container's preStop hook: no new requests for this pod's endpoints.

The one rule: it ends only when the state has been told, so that the kubelet's SIGTERM comes after. The running sidecar
says it, through its socket; only where that is gone does this process write to the store itself, once.
"""

import logging

import msgspec

from trimtab_sidecar.drain_socket import DrainSocketError, ask_to_drain
from trimtab_sidecar.settings import SettingsError, SidecarSettings, endpoint_address
from trimtab_state.documents import decode_heartbeat, encode
from trimtab_state.errors import CodecError, StateUnavailable
from trimtab_state.keys import PoolKeys
from trimtab_state.notices import Notice, notify
from trimtab_state.settings import StateSettings
from trimtab_state.store import Store, connect

logger = logging.getLogger(__name__)


async def drain(settings: SidecarSettings) -> bool:
    """True: the draining state was told, or nobody knows of the pod. Raises SettingsError, AccessError."""
    if settings.checkpoint_dir is None:
        raise SettingsError("drain needs --checkpoint-dir: the running sidecar listens there")
    try:
        await ask_to_drain(settings.checkpoint_dir)
        return True
    except DrainSocketError as error:
        logger.warning("the sidecar does not answer, telling the store", extra={"error": str(error)})
    access = settings.access
    if access is None and settings.access_folder is not None:
        access = settings.access_folder.read()
    if access is None:
        logger.info("nobody was ever told of this pod: the pool's Secret is not there")
        return True
    store = connect(access.store_url)
    try:
        count = await mark_draining(store, settings)
        logger.info("draining", extra={"endpoints": count})
        return True
    except StateUnavailable as error:
        logger.error("draining could not be told", extra={"error": str(error)})
        return False
    finally:
        await store.close()


async def mark_draining(store: Store, settings: SidecarSettings) -> int:
    """Rewrite the last heartbeats of this pod's endpoints; returns how many there were. Raises StateUnavailable."""
    keys, state = PoolKeys(settings.pool_namespace, settings.pool_name), StateSettings()
    addresses = tuple(endpoint_address(settings.endpoint_host, url) for url in settings.engine_urls)
    names = {name.decode() for name in await store.execute("SMEMBERS", keys.endpoints)}
    ours = sorted(name for name in names if name in addresses or name.rpartition("/")[0] in addresses)
    told = 0
    for name in ours:
        data = await store.execute("GET", keys.heartbeat(name))
        if data is None:
            continue
        try:
            last = decode_heartbeat(data)
        except CodecError:
            continue
        # Followers take each beat once.
        heartbeat = msgspec.structs.replace(last, state="draining", beat=last.beat + 1)
        ttl_ms = int(state.heartbeat_ttl_s * 1_000)
        await store.batch(
            [
                ("SET", keys.heartbeat(name), encode(heartbeat), "PX", ttl_ms),
                notify(keys, state, Notice.HEARTBEAT, name),
            ],
            atomic=True,
        )
        told += 1
    return told
