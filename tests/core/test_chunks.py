"""The chunk chain, pinned: another implementation, or another release, must give these very numbers."""

import numpy as np
import pytest
import xxhash

from trimtab_core.chunks import CHUNK_BYTES, extend_chain, hash_chunks, pool_seed, root_hash

SEED = 0x0123_4567_89AB_CDEF


def test_the_hash_underneath_is_xxh3_with_64_bits() -> None:
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06_8005_38D3_94C2  # the algorithm's published value


def test_seed_and_roots_have_their_golden_values() -> None:
    assert pool_seed(b"secret", "ns", "pool") == 0x9D69_7377_787D_7260
    assert root_hash(0) == 0x2D06_8005_38D3_94C2
    assert root_hash(SEED, "lora", "salt") == 0xF9C3_C3AF_6BE3_AB1D
    assert root_hash(7) == 0x913A_E087_3E9B_7EB8
    assert root_hash(7, "") == 0x21F8_6EFC_A305_4A04
    assert root_hash(7, None, "") == 0x1689_9DBB_69D9_49FB


def test_chains_have_their_golden_values() -> None:
    text = bytes(range(256))
    assert hash_chunks(text, root_hash(SEED), SEED).tolist() == [
        0x2ED4_A263_FD5E_7666,
        0xC3F0_2FBE_394F_E1DF,
        0x7882_DD50_6235_83CA,
        0xE353_B883_23CD_BB32,
    ]
    assert hash_chunks(text[:130], 1, 0).tolist() == [0x986B_1E22_DCAB_39C6, 0x0039_E52E_94AB_3FA4]


def test_the_step_is_the_formula_of_the_module() -> None:
    text, h = bytes(range(200)), root_hash(SEED)
    expected = []
    for k in range(len(text) // CHUNK_BYTES):
        local = xxhash.xxh3_64_intdigest(text[64 * k : 64 * k + 64], SEED)
        x = (h ^ local) * 0x9E37_79B9_7F4A_7C15 % 2**64
        h = x ^ (x >> 32)
        expected.append(h)
    assert hash_chunks(text, root_hash(SEED), SEED).tolist() == expected


def test_a_chain_can_be_extended_from_any_chunks_edge() -> None:
    text = bytes(range(256)) * 3
    whole = hash_chunks(text, 9, SEED).tolist()
    for k in range(1, len(whole)):
        assert extend_chain(whole[k - 1], text[64 * k :], SEED) == whole[k:]


@pytest.mark.parametrize("size", [0, 1, 63])
def test_less_than_a_chunk_has_no_hash(size: int) -> None:
    chain = hash_chunks(b"x" * size, 1, 2)
    assert chain.dtype == np.uint64
    assert len(chain) == 0


def test_a_chain_depends_on_all_before_it_on_its_root_and_on_the_seed() -> None:
    text = b"a" * 64 + b"b" * 64
    base = hash_chunks(text, root_hash(1), 1).tolist()
    for other in (
        hash_chunks(b"c" * 64 + b"b" * 64, root_hash(1), 1),
        hash_chunks(text, root_hash(1, "adapter"), 1),
        hash_chunks(text, root_hash(1, None, "salt"), 1),
        hash_chunks(text, root_hash(2), 2),
    ):
        assert not set(base) & set(other.tolist())


def test_a_lora_name_cannot_imitate_a_salt() -> None:
    roots = {
        root_hash(1),
        root_hash(1, "x"),
        root_hash(1, None, "x"),
        root_hash(1, "x", "x"),
        root_hash(1, "xS\x01\x00\x00\x00x"),
        root_hash(1, ""),
        root_hash(1, None, ""),
        root_hash(1, "\ud800"),  # a lone surrogate has bytes too
    }
    assert len(roots) == 8


def test_pools_do_not_share_seeds() -> None:
    assert pool_seed(b"secret", "a", "b/c") != pool_seed(b"other", "a", "b/c")
    assert pool_seed(b"secret", "a", "b") != pool_seed(b"secret", "a", "c")
