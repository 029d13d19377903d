"""Moving averages of any length, after the training: post-hoc EMA (Karras et al. 2023, EDM2, section 3.2, appendix C).

The average of length sigma_rel at step t weighs the weights of step tau by p(tau) = (gamma + 1) tau^gamma over
t^(gamma + 1). A run with --ema power keeps two such averages at many steps. The combination of them whose profile is
nearest to the wanted one, by least squares, is nearly the average that a training would have tracked.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError, user_errors
from common.files import CHECKSUM, load_safetensors
from run_folder.checkpoints import POWER_LENGTHS, SNAPSHOTS, power_exponent, snapshot_files
from run_folder.folder import RunFolder

if TYPE_CHECKING:
    import torch

    from run_folder.saved_model import SavedModel

logger = logging.getLogger(__name__)

# The share of the wanted profile that snapshots may fail to match (an L2 norm); beyond it the average is another one.
MOST_UNMET = 0.25
# The cost of a squared coefficient next to that squared share: about (float16 rounding / distance to raw weights)^2.
ROUNDING_COST = 1e-4


def inner_products(
    steps: np.ndarray, exponents: np.ndarray, other_steps: np.ndarray, other_exponents: np.ndarray
) -> np.ndarray:
    """Return the integrals of p_i p_j over all tau, of all pairs (Algorithm 3)."""
    t, gamma = (np.asarray(values, dtype=np.float64)[:, None] for values in (steps, exponents))
    t_other, gamma_other = (np.asarray(values, dtype=np.float64)[None] for values in (other_steps, other_exponents))
    decay = (t / t_other) ** np.where(t < t_other, gamma_other, -gamma)
    return (gamma + 1) * (gamma_other + 1) * decay / ((gamma + gamma_other + 1) * np.maximum(t, t_other))


def combination(steps: np.ndarray, exponents: np.ndarray, step: int, exponent: float) -> tuple[np.ndarray, float]:
    """Return the coefficients nearest to a profile (Algorithm 3), and the share of it that they leave unmet.

    Unlike in the paper their sum is 1, so that a weight that never changes stays as it is, and their squares have a
    price: large ones of alternating sign would fit the profile a little better and multiply the rounding of snapshots.
    """
    is_kept = (steps == step) & np.isclose(exponents, exponent)
    if is_kept.any():
        return is_kept.astype(float), 0.0
    wanted = np.array([step]), np.array([exponent])
    norm = inner_products(*wanted, *wanted).item()
    among, with_wanted = (inner_products(steps, exponents, *other) / norm for other in ((steps, exponents), wanted))
    count = len(steps)
    equations = np.ones((count + 1, count + 1))  # the last is that of the sum, the last unknown its multiplier
    equations[:count, :count] = among + ROUNDING_COST * np.eye(count)
    equations[count, count] = 0
    coefficients = np.linalg.solve(equations, np.append(with_wanted, 1))[:count]
    unmet = 1 - 2 * coefficients @ with_wanted[:, 0] + coefficients @ among @ coefficients
    return coefficients, max(unmet, 0.0) ** 0.5


def at_length(model: SavedModel, length: float) -> SavedModel:
    """Return a run's model with an average of another length at the same step, which `load` makes from snapshots."""
    step = model.step if model.step is not None else RunFolder(model.home).pipeline_step()
    there = snapshot_files(model.home)
    wanted = f"--ema_length {length:g}"
    if not there:
        raise UserError(
            f"{wanted}: {model.name} has no {SNAPSHOTS}; only a run of train_unconditional.py or train_conditional.py "
            f"with --ema power keeps them"
        )
    if step not in there:
        nearest = min(there, key=lambda one: abs(one - (step or 0)))
        raise UserError(
            f"{wanted}: {model.home / SNAPSHOTS} has no snapshot of step {step}, nearest is that of {nearest}; they "
            f"are kept every --checkpointing_steps and at the end, not where a run was stopped"
        )
    files = {one: path for one, path in there.items() if one <= step}
    _, unmet = combination(*profiles_of(files), step, power_exponent(length))
    if unmet > MOST_UNMET:
        raise UserError(
            f"{wanted}: the {len(files)} snapshots up to step {step} come no nearer to it than {unmet:.0%} of its "
            f"profile; a run with a lower --checkpointing_steps has more of them, and these reach lengths of "
            f"{' to '.join(f'{one:g}' for one in reached(files, step))}"
        )
    logger.info("%s at step %d: of %d snapshots, %.2g of its profile is unmet", wanted, step, len(files), unmet)
    identity = json.dumps([length, {one: checksum_of(path) for one, path in files.items()}])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return replace(model, weights=f"ema-{length:g}", sha256=digest, ema_length=length, snapshot_step=step)


def profiles_of(files: dict[int, Path]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the exponents of all averages in the snapshots, those of one file together."""
    steps = np.repeat(np.array([*files], dtype=np.float64), len(POWER_LENGTHS))
    return steps, np.tile([power_exponent(length) for length in POWER_LENGTHS], len(files))


def reached(files: dict[int, Path], step: int) -> tuple[float, float]:
    """Return the shortest and the longest length that snapshots can be combined to, to the third digit."""
    profiles = profiles_of(files)
    unmet = {length: combination(*profiles, step, power_exponent(length))[1] for length in np.arange(1, 289) / 1000}
    near = [length for length in unmet if unmet[length] <= MOST_UNMET]
    return near[0], near[-1]


def checksum_of(path: Path) -> str:
    """Return the checksum that stands in a snapshot, which reading all of it verifies later."""
    from safetensors import SafetensorError, safe_open

    no_snapshot = user_errors(f"{path}: is not a snapshot", OSError, SafetensorError, KeyError, TypeError)
    with no_snapshot, safe_open(path, "pt") as file:
        return file.metadata()[CHECKSUM]


def combine_snapshots(home: Path, step: int, length: float) -> dict[str, torch.Tensor]:
    """Return the weights of the average of this length at this step, summed up in float64."""
    import torch

    files = {one: path for one, path in snapshot_files(home).items() if one <= step}
    coefficients, _ = combination(*profiles_of(files), step, power_exponent(length))
    sums: dict[str, torch.Tensor] = {}
    for path, of_file in zip(files.values(), coefficients.reshape(len(files), -1).tolist(), strict=True):
        with user_errors(f"{path}: cannot be used", OSError, KeyError, ValueError, RuntimeError):
            tensors, _ = load_safetensors(path)
            for coefficient, kept in zip(of_file, POWER_LENGTHS, strict=True):
                prefix = f"{kept}."
                for name in [name for name in tensors if name.startswith(prefix)]:
                    tensor = tensors.pop(name).double()
                    name = name.removeprefix(prefix)
                    sums.setdefault(name, torch.zeros_like(tensor)).add_(tensor, alpha=coefficient)
            if tensors:
                raise ValueError(f"it holds {next(iter(tensors))}")
    return {name: tensor.float() for name, tensor in sums.items()}
