"""Randomness that is a function of its coordinates, so that a resume has nothing to restore.

Every random number of a run is f(seed, stream, step, position in the global batch). It does not depend on what was
drawn before, on how many processes share the batch, or on whether the run was interrupted.

Small draws that every process makes for the whole global batch (timesteps, flips, the order of an epoch) use a
seeded `torch.Generator`. Gaussian noise, which is large and needed only for the images at hand, comes from the
counter-based generator Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
evaluated with tensor operations on the device of the images.
"""

import hashlib
import math
from collections.abc import Callable

import torch

WORD = 0xFFFFFFFF
ROUNDS = 10


def derive_seed(*coordinates: int | str) -> int:
    """Return a 63-bit seed for a stream named by its coordinates, e.g. `derive_seed(seed, "dropout", step, rank)`."""
    digest = hashlib.blake2b(repr(coordinates).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(*coordinates: int | str) -> torch.Generator:
    """Return a CPU generator for the stream named by its coordinates.

    torch's takes the lower 32 bits of a seed: among 400,000 streams some sixteen pairs are the same.
    """
    return torch.Generator().manual_seed(derive_seed(*coordinates))


def philox(key: int | torch.Tensor, counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple:
    """Return four random 32-bit words (held in int64) for every 128-bit counter, by Philox-4x32-10."""
    c0, c1, c2, c3 = counter
    key0, key1 = key & WORD, (key >> 32) & WORD
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2^64, which leaves both 32-bit halves of the unsigned product intact.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (product0 >> 32) & WORD, (product1 >> 32) & WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, product1 & WORD, high0 ^ c3 ^ key1, product0 & WORD
        key0, key1 = (key0 + 0x9E3779B9) & WORD, (key1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def random_words(key: int | torch.Tensor, rows: torch.Tensor, column: int | torch.Tensor, blocks: int) -> tuple:
    """Return four random words for each of a number of blocks of each of `rows`."""
    block = torch.arange(blocks, device=rows.device).expand(len(rows), blocks)
    rows = rows[:, None].expand(len(rows), blocks)
    return philox(key, (block, torch.zeros_like(block) + (column & WORD), rows & WORD, (rows >> 32) & WORD))


_compiled_words: Callable[..., tuple] | None = None


def compile_words(device: torch.device) -> None:
    """Let a GPU compute `random_words` in one kernel that torch.compile makes, instead of 127.

    They are integers, which do not depend on who computes them. What they become, logarithms and cosines, would.
    """
    global _compiled_words
    if device.type == "cuda":
        _compiled_words = torch.compile(random_words, dynamic=True)


def standard_normal(key: int, rows: torch.Tensor, column: int | torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return float32 Gaussian noise of `shape` for each of `rows`, on their device.

    Row i's noise depends on (key, rows[i], column) alone: in training the row is the position in the global batch and
    the column the step; in generation the row is the image's seed and the column the denoising step.
    """
    count = math.prod(shape)
    blocks = -(-count // 4)
    if _compiled_words is not None and rows.device.type == "cuda":
        # As tensors, which may have other values without being compiled anew.
        key = torch.full((), key, device=rows.device)
        column = torch.full((), column, device=rows.device) if isinstance(column, int) else column
        words = _compiled_words(key, rows, column, blocks)
    else:
        words = random_words(key, rows, column, blocks)
    # Box-Muller on pairs of words: u in (0, 1], so that the logarithm is finite.
    uniform = [word.float().mul_(2.0**-32).add_(2.0**-33) for word in words]
    normals = []
    for u, v in (uniform[:2], uniform[2:]):
        radius, angle = u.log_().mul_(-2).sqrt_(), v.mul_(2 * math.pi)
        normals += [radius * angle.cos(), radius * angle.sin()]
    return torch.stack(normals, dim=-1).flatten(1)[:, :count].reshape(len(rows), *shape)
