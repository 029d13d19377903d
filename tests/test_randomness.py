"""Noise is a function of its coordinates, and it is noise."""

import itertools
import shutil

import pytest
import torch

from common import randomness
from common.randomness import WORD, derive_seed, generator_for, philox, random_words, standard_normal

# Known answers of Philox-4x32-10 published with Random123: key, counter, output.
KNOWN_ANSWERS = [
    (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, (WORD, WORD, WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0xA4093822 | 0x299F31D0 << 32,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(key, counter, answer):
    words = philox(key, tuple(torch.tensor([word]) for word in counter))
    assert tuple(word.item() for word in words) == answer


# Keys of 63 bits and of one, rows beyond 32 bits, and columns.
DRAWN = [(derive_seed("a"), [0, 1, 2**40 + 3], 7), (1, [5], 2**32 - 1), (derive_seed("b"), [2**62, 9], 0)]


def test_compiled_words_are_the_same():
    """By inductor for a CPU, where there is a C++ compiler; a GPU has Triton. A single row may have its own graph."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend = "inductor" if shutil.which("g++") else "aot_eager"
    compiled = torch.compile(random_words, dynamic=True, backend=backend)
    for (key, rows, column), blocks in itertools.product(DRAWN, (13, 64)):
        rows = torch.tensor(rows)
        words = compiled(torch.tensor(key), rows, torch.tensor(column), blocks)
        for one, other in zip(words, random_words(key, rows, column, blocks), strict=True):
            assert torch.equal(one, other)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2


def test_a_gpu_gets_compiled_words(monkeypatch):
    """And with them the noise that it has without: checked on fake tensors, which say that they are on a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    called = []
    monkeypatch.setattr(randomness, "_compiled_words", None)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: called.append(function) or function)
    randomness.compile_words(torch.device("cpu"))
    assert randomness._compiled_words is None
    randomness.compile_words(torch.device("cuda"))
    monkeypatch.setattr(randomness, "_compiled_words", lambda *given: called.append(given) or random_words(*given))
    with FakeTensorMode(), torch.device("cuda:0"):
        noise = standard_normal(derive_seed("a"), torch.arange(3), 5, (3, 8, 8))
    function, (key, _, column, blocks) = called
    assert function is random_words
    assert (noise.shape, noise.device.type, blocks) == ((3, 3, 8, 8), "cuda", 48)
    assert key.device == column.device == torch.device("cuda:0")
    standard_normal(1, torch.arange(3), 5, (3, 8, 8))
    assert len(called) == 2


def test_noise_of_a_row_does_not_depend_on_the_rows_beside_it():
    rows = torch.arange(20)
    together = standard_normal(1, rows, 3, (3, 9, 9))
    for size in (1, 3, 7):
        apart = torch.cat([standard_normal(1, part, 3, (3, 9, 9)) for part in rows.split(size)])
        assert torch.equal(together, apart)


def test_noise_differs_between_keys_rows_and_columns():
    rows = torch.tensor([0, 1, 2**32])  # the third differs from the first in the high word only
    draws = [standard_normal(key, rows, column, (64,)) for key in (1, 2) for column in (0, 1)]
    flat = torch.cat(draws)
    assert len({tuple(row.tolist()) for row in flat}) == len(flat)
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.5


def test_noise_is_gaussian():
    noise = standard_normal(5, torch.arange(1000), 0, (1000,)).double()
    count = noise.numel()
    assert noise.mean().abs() < 5 / count**0.5
    assert (noise.var() - 1).abs() < 5 * (2 / count) ** 0.5
    # Kolmogorov-Smirnov at significance 1e-6.
    ordered = noise.flatten().sort().values
    expected = torch.special.ndtr(ordered)
    observed = torch.arange(1, count + 1) / count
    assert (expected - observed).abs().max() < 2.7 / count**0.5
    # Neighbours, which share a Box-Muller pair or a counter, are independent.
    lags = [(noise[:, :-lag] * noise[:, lag:]).mean().abs() for lag in (1, 2, 3, 4)]
    assert max(lags) < 5 / count**0.5


def test_seeds_are_stable_and_streams_apart():
    assert derive_seed(0, "noise") == derive_seed(0, "noise")
    seeds = {derive_seed(seed, stream, step) for seed in (0, 1) for stream in ("a", "b") for step in range(50)}
    assert len(seeds) == 200
    draws = [torch.rand(4, generator=generator_for(0, "order", epoch)) for epoch in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_processes_differ_from_one_another():
    """Each process has its own positions in the batch, hence its own noise, and its own dropout."""
    noise = standard_normal(1, torch.arange(16), 0, (64,)).unflatten(0, (2, 8))
    assert not torch.isclose(noise[0], noise[1]).any(dim=1).all()
    assert len({derive_seed(0, "dropout", 5, process) for process in range(64)}) == 64
