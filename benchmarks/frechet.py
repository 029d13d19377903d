#!/usr/bin/env python
"""The Fréchet distance of two Gaussians with 2048 dimensions, by the project and by scipy's matrix root.

    python -m benchmarks.frechet

Both get the same means and covariances, of made-up features, and compute |m - m'|^2 + tr(C + C' - 2 sqrt(C C')) in
float64. The peer is what the packages for FID do: scipy.linalg.sqrtm of the product.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg
import torch

from benchmarks.measuring import Result, Row, Spread, in_turns, parser, ratios, seconds, write_result
from common.errors import run_script
from evaluation.metrics import Moments, frechet_distance

DIMENSIONS, FEATURES, ROUNDS = 2048, 10_000, 3
QUICK_DIMENSIONS, QUICK_FEATURES = 64, 200
FASTER, MOST_DIFFERENCE = 8.0, 1e-3


def made_up(dimensions: int, count: int, generator: torch.Generator) -> Moments:
    """Return moments of correlated features whose variances span several orders, as Inception's do."""
    mixing = torch.randn(dimensions, dimensions, generator=generator, dtype=torch.float64) / dimensions**0.5
    scales = torch.logspace(0, -4, dimensions, dtype=torch.float64)
    features = torch.randn(count, dimensions, generator=generator, dtype=torch.float64) * scales @ mixing
    return Moments.of_features(features)


def by_scipy(generated: Moments, reference: Moments) -> float:
    """Compute the distance as the packages do."""
    root = scipy.linalg.sqrtm(generated.covariance.numpy() @ reference.covariance.numpy())
    distance = (generated.mean - reference.mean).square().sum().item()
    traces = (generated.covariance.trace() + reference.covariance.trace()).item()
    return distance + traces - 2 * float(np.trace(root).real)


def main() -> None:
    options = parser(__doc__).parse_args()
    sizes = (QUICK_DIMENSIONS, QUICK_FEATURES) if options.quick else (DIMENSIONS, FEATURES)
    generator = torch.Generator().manual_seed(0)
    first, second = (made_up(*sizes, generator) for _ in range(2))
    found: dict[str, float] = {}

    def here() -> float:
        # The root of a reference is kept with it: here it is computed every time.
        pair = [Moments(moments.mean, moments.covariance) for moments in (first, second)]
        return seconds(lambda: found.update(here=frechet_distance(*pair)))

    def there() -> float:
        return seconds(lambda: found.update(scipy=by_scipy(first, second)))

    times = in_turns({"here": here, "scipy": there}, ROUNDS, warm_up=0 if not options.quick else 1)
    ours, theirs = (Spread.of(times[name]).median for name in ("here", "scipy"))
    what = f"Fréchet distance, {sizes[0]} dimensions"
    columns = f"{ours:.2f} s", f"scipy's sqrtm: {theirs:.2f} s"
    difference = abs(found["here"] / found["scipy"] - 1)
    rows = [
        Row(what, *columns, ratios(times["scipy"], times["here"]), to_reach=FASTER),
        Row(
            "relative difference of the two distances",
            f"{found['here']:.8g}",
            f"scipy's sqrtm: {found['scipy']:.8g}",
            Spread.of([difference]),
            "",
            MOST_DIFFERENCE,
            "at most",
        ),
    ]
    write_result("frechet", Result(rows, {"seconds": times, "distances": found}), options.output_dir)


if __name__ == "__main__":
    run_script(main)
