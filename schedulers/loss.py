"""The objective: the timestep samplers, loss weightings and losses that a run may choose from."""

from schedulers.adaptive_samplers import AdaptiveTimestepSampling, LossSecondMoment
from schedulers.timestep_samplers import EDM, LogitNormal, SpeeD, Stratified, TimestepSampler, Uniform

TIMESTEP_SAMPLERS: dict[str, type[TimestepSampler]] = {
    "uniform": Uniform,
    "stratified": Stratified,
    "logit_normal": LogitNormal,
    "edm": EDM,
    "speed": SpeeD,
    "loss_second_moment": LossSecondMoment,
    "ats": AdaptiveTimestepSampling,
}
