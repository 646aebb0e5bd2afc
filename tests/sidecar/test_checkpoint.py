"""A checkpoint is read back whole or refused, and what it is read into goes on as if nothing had happened."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidecar_captures import SEED, frames, tiny_table

from trimtab_core.block_chains import BlockChains
from trimtab_sidecar import vllm_events
from trimtab_sidecar.cached_prefixes import CachedPrefixes
from trimtab_sidecar.checkpoint import CHECKPOINT_BYTES_MAX, Checkpoint, CheckpointError, CheckpointFile

TABLE = tiny_table()


def checkpoint(chains: bytes = b"chains", endpoint: str = "10.0.0.1:8000") -> Checkpoint:
    return Checkpoint(
        endpoint=endpoint,
        epoch="epoch",
        engine="123.45",
        sequence=7,
        digest=2**64 - 1,
        group=0,
        other_groups={1: "sliding_window", 2: None},
        chains=chains,
    )


@pytest.fixture
def file(tmp_path: Path) -> CheckpointFile:
    return CheckpointFile(tmp_path, "10.0.0.1:8000")


def test_what_was_written_is_read(file: CheckpointFile) -> None:
    assert file.read() is None
    size = file.write(checkpoint())
    assert file.read() == checkpoint()
    assert file.path.stat().st_size == size
    assert file.path.stat().st_mode & 0o077 == 0
    file.write(checkpoint(b"newer"))
    assert file.read() == checkpoint(b"newer")
    assert [path.suffix for path in file.path.parent.iterdir()] == [".checkpoint"]


@given(at=st.integers(0, 200), flip=st.integers(1, 255), cut=st.booleans())
def test_any_damage_is_refused(at: int, flip: int, cut: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = CheckpointFile(tmp_path_factory.mktemp("checkpoint"), "10.0.0.1:8000")
    file.write(checkpoint())
    data = bytearray(file.path.read_bytes())
    at %= len(data)
    data = data[:at] if cut else data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
    file.path.write_bytes(data)
    with pytest.raises(CheckpointError):
        file.read()


def test_another_endpoints_checkpoint_is_refused(file: CheckpointFile, tmp_path: Path) -> None:
    other = CheckpointFile(tmp_path, "10.0.0.1:8000/1")
    assert other.path != file.path
    other.write(checkpoint(endpoint="10.0.0.1:8000/1"))
    other.path.rename(file.path)
    with pytest.raises(CheckpointError, match="another endpoint"):
        file.read()


def test_names_that_look_alike_as_files_stay_apart(tmp_path: Path) -> None:
    paths = {CheckpointFile(tmp_path, name).path for name in ("[::1]:80", "_::1_:80", "[::1]_80", "..:80/../x")}
    assert len(paths) == 4
    assert all(path.parent == tmp_path for path in paths)


def test_a_file_that_is_too_large_is_not_read(file: CheckpointFile) -> None:
    with file.path.open("wb") as sparse:
        sparse.truncate(CHECKPOINT_BYTES_MAX + 1)
    with pytest.raises(CheckpointError, match="too large"):
        file.read()


def test_a_folder_that_is_gone_is_an_error_of_the_system(file: CheckpointFile) -> None:
    gone = CheckpointFile(file.path.parent / "nothing", "10.0.0.1:8000")
    with pytest.raises(OSError, match="No such file"):
        gone.write(checkpoint())
    assert gone.read() is None


def test_unknown_fields_of_a_later_version_are_passed_over(file: CheckpointFile) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(checkpoint()))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields | {"more": 1}), type=Checkpoint) == checkpoint()


@pytest.mark.parametrize("cut", [3, 12, 20])
def test_a_map_from_a_checkpoint_goes_on_where_it_was(cut: int) -> None:
    captured = [payload for _, payload, _ in frames("pod1_sha256_int_block32")]
    whole, first = CachedPrefixes(TABLE, SEED), CachedPrefixes(TABLE, SEED)
    for payload in captured:
        whole.apply(vllm_events.decode(payload))
    for payload in captured[:cut]:
        first.apply(vllm_events.decode(payload))
    chains = BlockChains.load(TABLE, SEED, first.chains.dump())
    second = CachedPrefixes(TABLE, SEED, chains=chains, group=first.group)
    for payload in captured[cut:]:
        second.apply(vllm_events.decode(payload))
    assert sorted(zip(*second.chunks(), strict=True)) == sorted(zip(*whole.chunks(), strict=True))
