"""Numbers are a function of (seed, name, global index): the same however a tensor is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paracore.counter_random import (
    fill_region_,
    integers_at,
    key_of,
    normal_at,
    permute,
    philox,
    uniform_at,
)
from paracore.errors import UsageError


def test_philox_known_answers() -> None:
    """From the test vectors that Random123 publishes."""
    words = philox(torch.tensor([0]), (0, 0))
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def philox_in_plain_python(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition, word by word."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            first >> 32 ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_philox_in_plain_python_gives_the_published_numbers() -> None:
    ones = 0xFFFFFFFF
    assert philox_in_plain_python([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox_in_plain_python(*digits) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@given(counter=st.integers(0, 2**63 - 1), key=st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
def test_philox_uses_all_of_counter_and_key(counter: int, key: tuple[int, int]) -> None:
    words = philox(torch.tensor([counter]), key)
    expected = philox_in_plain_python([counter & 0xFFFFFFFF, counter >> 32, 0, 0], list(key))
    assert [int(word) for word in words] == expected


def test_normal_numbers_have_the_moments_of_a_normal_distribution() -> None:
    z = normal_at(torch.arange(1 << 18), seed=1, name="a")
    assert z.mean().abs() < 0.01
    assert (z.std() - 1).abs() < 0.01
    assert (z.pow(4).mean() - 3).abs() < 0.1
    # Kolmogorov and Smirnov: the empirical distribution lies within 1.63 / sqrt(n) at 99 %.
    uniform = torch.special.ndtr(z.sort().values)
    assert (uniform - torch.linspace(0, 1, len(z), dtype=torch.float64)).abs().max() < 1.63 / len(z) ** 0.5


def test_the_normal_quantile_is_exact_to_rounding() -> None:
    index = torch.arange(1 << 14)
    z, p = normal_at(index, 0, "a"), uniform_at(index, 0, "a")
    torch.testing.assert_close(z, torch.special.ndtri(p), rtol=1e-13, atol=1e-14)


def test_streams_differ_by_seed_and_by_name() -> None:
    index = torch.arange(1000)
    streams = [uniform_at(index, seed, name) for seed in (0, 1) for name in ("a", "b")]
    for i, stream in enumerate(streams):
        for other in streams[:i]:
            assert (stream == other).sum() == 0
    assert key_of(0, "a") != key_of(0, "b")


@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    cut=st.integers(0, 2),
    parts=st.integers(1, 5),
    threads=st.integers(1, 2),
)
def test_any_cut_gives_the_numbers_of_the_whole(shape: list[int], cut: int, parts: int, threads: int) -> None:
    dim = cut % len(shape)

    def draw(index: torch.Tensor) -> torch.Tensor:
        return normal_at(index, 7, "weight")

    whole = torch.full(shape, torch.nan)
    fill_region_(whole, [range(n) for n in shape], shape, draw)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pieces = []
        for bounds in torch.arange(shape[dim]).tensor_split(parts):
            start, stop = (int(bounds[0]), int(bounds[-1]) + 1) if len(bounds) else (0, 0)
            region = [range(start, stop) if d == dim else range(n) for d, n in enumerate(shape)]
            piece = torch.full([len(r) for r in region], torch.nan)
            fill_region_(piece, region, shape, draw)
            pieces.append(piece)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(pieces, dim), whole)


def test_large_indices_do_not_repeat_small_ones() -> None:
    small = torch.arange(100)
    assert (uniform_at(small, 0, "a") == uniform_at(small + 2**32, 0, "a")).sum() == 0


def test_wide_rows_are_drawn_in_pieces() -> None:
    shape, seen = (2, 3, 1 << 15), []

    def draw(index: torch.Tensor) -> torch.Tensor:
        seen.append(index.numel())
        return index.double()

    out = torch.full(shape, torch.nan, dtype=torch.float64)
    fill_region_(out, [range(n) for n in shape], shape, draw)
    assert torch.equal(out.flatten(), torch.arange(out.numel(), dtype=torch.float64))
    assert max(seen) <= 1 << 16


@pytest.mark.parametrize("high", [0, 2**31 + 1])
def test_integers_beyond_the_range_are_refused(high: int) -> None:
    with pytest.raises(UsageError, match=f"high={high}"):
        integers_at(torch.arange(3), 0, "tokens", high)
    assert integers_at(torch.arange(1000), 0, "tokens", 2**31).min() >= 0


def test_integers_cover_their_range_evenly() -> None:
    counts = integers_at(torch.arange(70_000), 0, "tokens", 7).bincount(minlength=7)
    assert len(counts) == 7
    assert (counts - 10_000).abs().max() < 500


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17, 255, 256, 257])
def test_permute_is_a_permutation_that_depends_on_seed_and_name(length: int) -> None:
    order = [permute(i, length, 0, "epoch 0") for i in range(length)]
    assert sorted(order) == list(range(length))
    if length > 16:
        assert order != [permute(i, length, 1, "epoch 0") for i in range(length)]
        assert order != [permute(i, length, 0, "epoch 1") for i in range(length)]
        assert order != list(range(length))
