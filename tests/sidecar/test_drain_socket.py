"""`drain` and the sidecar meet at a socket that only the pod sees."""

import asyncio
from pathlib import Path

import pytest

from trimtab_sidecar.__main__ import EXIT_SETTINGS, main
from trimtab_sidecar.drain_socket import DrainSocketError, ask_to_drain, serve_drain, socket_path


async def test_the_answer_comes_after_the_drain(tmp_path: Path) -> None:
    done: list[str] = []

    async def drain() -> None:
        await asyncio.sleep(0)
        done.append("drained")

    server = await serve_drain(tmp_path, drain)
    async with server:
        await ask_to_drain(tmp_path)
        assert done == ["drained"]
        assert socket_path(tmp_path).stat().st_mode & 0o077 == 0


async def test_other_words_drain_nothing(tmp_path: Path) -> None:
    async def drain() -> None:
        raise AssertionError("nobody asked")

    async with await serve_drain(tmp_path, drain):
        for word in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 10_000, b""):
            reader, writer = await asyncio.open_unix_connection(str(socket_path(tmp_path)))
            writer.write(word)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()


async def test_a_sidecar_that_is_gone_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DrainSocketError):
        await ask_to_drain(tmp_path)

    async def drain() -> None: ...

    server = await serve_drain(tmp_path, drain)
    server.close()
    await server.wait_closed()
    with pytest.raises(DrainSocketError):
        await ask_to_drain(tmp_path)
    # What a sidecar left behind does not keep the next one from listening.
    async with await serve_drain(tmp_path, drain):
        await ask_to_drain(tmp_path)


async def test_a_folder_whose_path_is_too_long_is_refused(tmp_path: Path) -> None:
    async def drain() -> None: ...

    with pytest.raises(DrainSocketError, match="too long"):
        await serve_drain(tmp_path / ("x" * 120), drain)


def test_drain_without_a_place_to_meet_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMTAB_SECRET", "secret")
    flags = [
        "--pool-name",
        "p",
        "--pool-namespace",
        "n",
        "--endpoint-host",
        "127.0.0.1",
        "--store",
        "redis://127.0.0.1:1",
    ]
    assert main(["drain", *flags]) == EXIT_SETTINGS
    assert "--checkpoint-dir" in capsys.readouterr().err
