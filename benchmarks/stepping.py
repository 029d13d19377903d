"""Run a training script as it is, so many steps at a time: the other end of a `Worker`.

    python -m benchmarks.stepping SCRIPT [ARGUMENTS ...]

The script is not changed. Hooks of torch count the steps of whatever optimiser it has and hold it there until the next
order; an order is a number of steps, the answer the seconds that they took. The first answer comes after the first
step. What is hooked is imported when the script does that, and not before.
"""

import importlib.abc
import importlib.machinery
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from benchmarks.measuring import Orders

times: dict[str, float] = {}


class Turns:
    """Takes the steps that were ordered, and waits for the next order in between."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.left = orders, 0

    def __call__(self, *_: object) -> None:
        """Count a step; torch calls this after every step of an optimiser."""
        self.left -= 1
        if self.left > 0:
            return
        if self.left < 0:  # the first of all
            self.orders.answer(**times, first_step=time.perf_counter(), processor_seconds=time.process_time())
        else:
            self.orders.answer(seconds=time.perf_counter() - self.start)
        self.left = int(self.orders.next())
        self.start = time.perf_counter()


def noting(name: str, function: Callable) -> Callable:
    """Wrap a function so that the time of its first call is noted."""

    def wrapped(*arguments: object, **options: object) -> object:
        times.setdefault(name, time.perf_counter())
        return function(*arguments, **options)

    return wrapped


def note_first_batch(module: object, _: object) -> None:
    """Note when a network in training is first called after the data were asked for."""
    if module.training and "data_asked_for" in times:
        times.setdefault("first_batch", time.perf_counter())


class Hooks(importlib.abc.MetaPathFinder):
    """Does something to each of these modules as soon as it has been imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], object]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Find a module as Python does, and let the action follow its execution."""
        action = self.actions.pop(name, None)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if action else None
        if spec:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), action(module))
        return spec


def hook(function: str) -> Callable[[ModuleType], None]:
    """Return what notes the first call of a function that asks for the data."""
    return lambda module: setattr(module, function, noting("data_asked_for", getattr(module, function)))


def main() -> None:
    orders, (script, *arguments) = Orders(), sys.argv[1:]
    actions = {
        "datasets.load": hook("load_dataset"),
        "image_data.sources": hook("load_images"),  # which lets a child call the other
        "torch.nn.modules.module": lambda module: module.register_module_forward_pre_hook(note_first_batch),
        "torch.optim.optimizer": lambda module: module.register_optimizer_step_post_hook(Turns(orders)),
    }
    sys.meta_path.insert(0, Hooks(actions))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
