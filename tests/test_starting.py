"""A script imports what it uses, and what it has not imported can still be had."""

import subprocess
import sys

from conftest import ROOT

UNUSED = ("diffusers.loaders.lora_base", "scipy.stats", "torchvision", "transformers.models.auto", "datasets")
# The first mistake that is found after the imports.
FLAGS = ["--dataset_name=digits", "--train_batch_size=3", "--total_batch_size=4"]
STARTED = f"""
import gc, runpy, sys, types
sys.argv = ["train_unconditional.py", *{FLAGS}]
sys.path.insert(0, ".")
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ending:
    assert ending.code == 2, ending
assert "training.setup" in sys.modules
print([name for name in {UNUSED} if name in sys.modules])
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
from diffusers import UNet1DModel, UNet2DConditionModel, UNet2DModel
print(UNet1DModel.__module__, UNet2DConditionModel.__module__)
from diffusers.models import transformers, unets
for package, name in ((unets, "UNet3DConditionModel"), (transformers, "DiTTransformer2DModel")):
    print(type(package) is types.ModuleType, getattr(package, name).__name__, type(package) is types.ModuleType)
print(unets.UNet2DModel is UNet2DModel, hasattr(unets, "NoSuchModel"))
"""


def test_a_training_imports_what_it_uses():
    started = subprocess.run([sys.executable, "-c", STARTED], cwd=ROOT, capture_output=True, text=True)
    assert started.stdout.splitlines() == [
        "[]",
        "True True",
        "diffusers.models.unets.unet_1d diffusers.models.unets.unet_2d_condition",
        "False UNet3DConditionModel True",
        "False DiTTransformer2DModel True",
        "True False",
    ], started.stderr
    assert "leaked" not in started.stderr  # as some libraries say in the end of what is never collected
