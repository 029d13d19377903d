"""From flags to a denoising method; nothing heavy is imported until one is built, so that --help answers at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    from generation.generate_options import SamplerOptions
    from run_folder.saved_model import SavedModel
    from schedulers.denoising import DenoisingMethod

SHORT_SAMPLING = 50

# The methods by the flag that chooses each: the class in schedulers/denoising.py, and the flags that are its own.
# The schedulers of diffusers, which --scheduler chooses by their names, have none.
METHODS = {"ddim": ("DDIM", ("skip_schedule", "eta")), "ddpm": ("DDPM", ("skip_schedule", "variance_type"))}
OWN_SETTINGS = tuple(dict.fromkeys(setting for _, settings in METHODS.values() for setting in settings))
METHOD_SETTINGS = ("sampler", "num_inference_steps", *OWN_SETTINGS)  # as records and tables have them


def chosen_method(options: SamplerOptions) -> str:
    """Return the name of the method that the flags choose; raise if another one's settings are with it."""
    given = [name for name in (*METHODS, "scheduler") if getattr(options, name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(f'--{name}' for name in given)}: choose one sampler")
    method = options.scheduler or (given[0] if given else options.default_sampler)
    for setting in OWN_SETTINGS:
        value, owners = getattr(options, setting), [name for name, (_, own) in METHODS.items() if setting in own]
        if method in owners or value == getattr(type(options), setting):
            continue
        if setting == "skip_schedule":
            raise UserError(f"--skip_schedule {value}: {method} chooses its timesteps itself")
        value = f"{value:g}" if isinstance(value, float) else value
        raise UserError(f"--{setting} {value}: is a setting of --{' and --'.join(owners)}, not of {method}")
    return method


def build_method(options: SamplerOptions, model: SavedModel) -> DenoisingMethod:
    """Return the denoising method that the flags choose, on the diffusion that a model was trained with."""
    from schedulers import denoising

    name, total = chosen_method(options), model.scheduler.config.num_train_timesteps
    steps = options.num_inference_steps or (total if name == "ddpm" else min(SHORT_SAMPLING, total))
    if steps > total:
        raise UserError(f"--num_inference_steps {steps}: more than the {total} steps {model.name} was trained with")
    if name in METHODS:
        method, settings = METHODS[name]
        return getattr(denoising, method)(model.scheduler, steps, **{key: getattr(options, key) for key in settings})
    try:
        return denoising.DiffusersMethod(model.scheduler, name, steps)
    except denoising.UnusableScheduler as error:
        raise UserError(f"--scheduler {name}: {error}") from error
