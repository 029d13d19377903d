"""The training loop: algorithm 1 of Ho et al. 2020.

*step* counts finished optimiser steps. Everything random in step s is a function of (seed, s, position in the global
batch), so a run needs only its tensors and s to go on as if it had never stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from common.interruption import fault_point

if TYPE_CHECKING:
    from image_data.batches import Batch
    from training.setup import Run


def train(run: Run) -> None:
    """Repeat the lines of algorithm 1 until the run is over; raise `Interrupted` if somebody asks for a stop."""
    loss, state, update = run.state.loss, run.state, run.state.update
    run.network.train()
    run.milestones.catch_up(state)
    if run.over_at_start:
        return

    for batch in run.tracking.timed(run.batches.from_step(state.step)):  # 1: repeat; 2: x_0 ~ q(x_0)
        t, weights = loss.draw(batch)  # 3: t ~ Uniform({1, ..., T}), or the sampler's density; here t counts from 0
        update.begin(batch.step)
        errors, global_errors = run.learn(batch, t, weights)  # 4, 5: as `learn` says
        update.finish()
        state.window.note(t, errors)
        loss.observe(batch.step, global_errors)
        fault_point("update")
        state.step += 1

        ending = run.ending()
        run.check_health(ending)
        run.tracking.log(state, ending)
        run.milestones.after_step(state, ending)
        if ending == "finished":  # 6: until converged
            return


def learn(run: Run, batch: Batch, t: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the gradient step; return this process's errors, and the global batch's if a sampler observes them.

    Nothing in here is decided on the host, so that it can also be captured as a CUDA graph.
    """
    loss, state, update = run.state.loss, run.state, run.state.update
    errors, update.objective = [], torch.zeros((), device=run.processes.device)
    for number, (part, t_of_part, weight) in enumerate(batch.in_passes(t, weights), start=1):
        with run.gradient_exchange(enabled=number == batch.passes):
            error = loss(run.network, part, t_of_part)  # 4: epsilon ~ N(0, I), and |epsilon - epsilon_theta(x_t, t)|^2
            update.backward((weight * error).mean() / batch.passes)  # 5: its gradient
        errors.append(error.detach())

    update.clip(state.window.exchange_timer)
    errors = torch.cat(errors)
    # Add the step to the window's sums, in a single exchange with the other processes.
    global_errors = loss.in_global_batch(errors, batch)
    all_finite, global_errors = state.window.add_step(t, weights, errors, update, global_errors)
    with loss.around_update(state.unet, batch):
        update.step(batch.step, all_finite)  # 5: take the gradient step
    return errors, global_errors
