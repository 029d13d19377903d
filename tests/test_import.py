"""Weights of other projects: the pipeline made of them gives the outputs that they gave, or there is one line why not.

The networks are those of tests/original_unet.py, under each project's names, and of a second stand-in here.
"""

import json
import logging
import math
import pickle
import zipfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import run_script
from diffusers import DDPMPipeline
from original_unet import OriginalUNet, randomize

from common.errors import UserError
from run_folder.imported_weights import PROJECTS, scheduler_for
from run_folder.saved_model import find_models
from schedulers.denoising import DDPM

TIMESTEPS = (0, 10, 300, 999)


@pytest.fixture(scope="module")
def original() -> OriginalUNet:
    network = OriginalUNet(ch=32, ch_mult=(1, 2, 2), num_res_blocks=2, attn_resolutions=(16,), resolution=32).eval()
    randomize(network.named_parameters())
    return network


def layers_of(original: OriginalUNet) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor by scope and layer: ("down_1/block_0", "conv1.weight")."""
    return {
        (scope, name): parameter.detach().clone()
        for scope, module in original.layers.items()
        for name, parameter in module.named_parameters()
    }


def under_tensorflow_names(original: OriginalUNet) -> dict[str, np.ndarray]:
    """The variables of a training: the weights, beside them their average, and the optimiser's."""
    variables = {"global_step": np.int64(790000), "beta1_power": np.float32(0), "_GRAPH": np.bytes_(b"of objects")}
    for (scope, name), tensor in layers_of(original).items():
        layer, _, part = name.rpartition(".")
        kind = {"weight": "W", "bias": "b"}[part]
        if "norm" in f"{scope}/{layer}".rpartition("/")[2] or (not layer and scope == "norm_out"):
            kind = {"weight": "gamma", "bias": "beta"}[part]
        array = tensor.numpy()
        array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
        path = "/".join(filter(None, ["model", scope, layer, kind]))
        variables |= {path: array * 0, f"{path}/ExponentialMovingAverage": array, f"{path}/Adam": array * 0}
    return variables


def under_port_names(original: OriginalUNet) -> dict[str, torch.Tensor]:
    """pesser/pytorch_diffusion: lists where TensorFlow has numbers, convolutions of one pixel for linear maps."""
    renamed = {}
    for (scope, name), tensor in layers_of(original).items():
        level, _, block = scope.partition("/")
        if level.startswith(("down_", "up_")):
            level = level.replace("_", ".")
            block = block.replace("_", ".")
        elif level == "temb":
            block = block.replace("dense", "dense.")
        linear = name.split(".")[0] in ("nin_shortcut", "q", "k", "v", "proj_out") and tensor.ndim == 2
        tensor = tensor[:, :, None, None] if linear else tensor
        renamed[".".join(filter(None, [level, block, name]))] = tensor
    return renamed


def under_tqch_names(original: OriginalUNet) -> dict[str, torch.Tensor]:
    """tqch/ddpm-torch: a residual block alone, or in a pair with attention; q, k and v in one."""
    layers, renamed = layers_of(original), {}
    places = {"temb/dense0": "embed.0", "temb/dense1": "embed.2", "conv_in": "in_conv", "norm_out": "out_conv.0"}
    places |= {"conv_out": "out_conv.2", "mid/block_1": "middle.0", "mid/attn_1": "middle.1", "mid/block_2": "middle.2"}
    parts = {"temb_proj": "fc", "nin_shortcut": "skip", "proj_out": "project_out"}
    for (scope, name), tensor in layers.items():
        layer, _, kind = name.rpartition(".")
        if scope not in places:
            level, _, block = scope.partition("/")
            way, _, number = level.partition("_")
            place = f"{way}samples.level_{number}"
            if block.endswith("sample"):  # comes after two blocks down, after three up
                renamed[f"{place}.{2 if way == 'down' else 3}.1.{kind}"] = tensor
                continue
            kind_of_block, _, index = block.partition("_")
            pair = f"{level}/attn_{index}" in original.layers
            place += f".{index}" + (f".{('block', 'attn').index(kind_of_block)}" if pair else "")
        else:
            place = places[scope]
        if layer in ("q", "k", "v"):
            if layer == "q":
                three = torch.cat([layers[scope, f"{one}.{kind}"] for one in "qkv"])
                renamed[f"{place}.project_in.{kind}"] = three[..., None, None] if three.ndim == 2 else three
            continue
        if layer in ("nin_shortcut", "proj_out") and tensor.ndim == 2:
            tensor = tensor[..., None, None]
        renamed[".".join(filter(None, [place, parts.get(layer, layer), kind]))] = tensor
    return renamed


@pytest.fixture
def import_weights(tmp_path):
    """import_weights.py in this process, of a file of these contents."""

    def call(stored: object, *flags: str, name: str = "weights.pt"):
        path, folder = tmp_path / name, tmp_path / "imported"
        if path.suffix == ".npz":
            np.savez(path, **stored)
        else:
            torch.save(stored, path)
        try:
            run_script("import_weights", str(path), f"--output_dir={folder}", *flags)
        finally:
            logging.getLogger().handlers.clear()
        return DDPMPipeline.from_pretrained(folder)

    return call


def largest_error(pipeline, expected, size: int = 32) -> float:
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))
    errors = []
    with torch.no_grad():
        for number in TIMESTEPS:
            t = torch.full((2,), number)
            output = expected(x, t)
            errors.append((pipeline.unet(x, t).sample - output).abs().max() / output.abs().max())
    return max(errors).item()


class TestTheOriginal:
    def test_tensorflow(self, original, import_weights):
        pipeline = import_weights(under_tensorflow_names(original), name="weights.npz")
        assert largest_error(pipeline, original) < 1e-5
        config = pipeline.scheduler.config
        assert (config.beta_schedule, config.beta_start, config.beta_end) == ("linear", 1e-4, 0.02)
        assert (config.variance_type, config.clip_sample, config.num_train_timesteps) == ("fixed_large", True, 1000)

    def test_images_are_made_with_the_variance_that_was_imported(self, original, import_weights, tmp_path):
        import_weights(under_tensorflow_names(original), "--variance_type=fixed_small", name="weights.npz")
        folder = tmp_path / "imported"
        (model,) = find_models(str(folder), [], None)
        assert DDPM(model.scheduler, 1000).settings["variance_type"] == "fixed_small"
        index = json.loads((folder / "model_index.json").read_text())
        (folder / "model_index.json").write_text(json.dumps({name: index[name] for name in index if name != "_step"}))
        (model,) = find_models(str(folder), [], None)  # a pipeline of somebody else's
        assert DDPM(model.scheduler, 1000).settings["variance_type"] == "fixed_large"

    def test_its_port(self, original, import_weights):
        assert largest_error(import_weights(under_port_names(original)), original) < 1e-5

    def test_tqch(self, original, import_weights):
        shadow = under_tqch_names(original)
        raw = {f"module.{name}": tensor * 0 for name, tensor in shadow.items()}
        stored = {"model": raw, "ema": {"decay": 0.9999, "num_updates": 2, "shadow": shadow}, "epoch": 3}
        stored |= {"fid": np.float64(3.17), "train_loss": np.float32(0.03), "best_epoch": np.int64(7)}
        assert largest_error(import_weights(stored), original) < 1e-5

    def test_numbers_that_numpy_1_has_written(self, original, tmp_path):
        """Its module had another name, which pickles keep."""
        path, old = tmp_path / "new.pt", tmp_path / "old.pt"
        torch.save(under_tqch_names(original) | {"fid": np.float64(3.17)}, path)
        with zipfile.ZipFile(path) as new, zipfile.ZipFile(old, "w") as file:
            for name in new.namelist():
                file.writestr(name, new.read(name).replace(b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"))
        assert path.read_bytes() != old.read_bytes()
        run_script("import_weights", str(old), f"--output_dir={tmp_path / 'imported'}")
        logging.getLogger().handlers.clear()
        assert largest_error(DDPMPipeline.from_pretrained(tmp_path / "imported"), original) < 1e-5

    def test_raw_weights(self, original, import_weights):
        shadow = under_tqch_names(original)
        stored = {"model": shadow, "ema": {"shadow": {name: tensor * 0 for name, tensor in shadow.items()}}}
        assert largest_error(import_weights(stored, "--weights=raw"), original) < 1e-5


def test_what_is_no_choice_of_weights_is_refused(tmp_path):
    torch.save({"conv_in.weight": torch.zeros(1), 0: torch.zeros(1)}, tmp_path / "one.pt")
    with pytest.raises(UserError, match="--weights raw: .*one.pt does not hold both"):
        run_script("import_weights", str(tmp_path / "one.pt"), f"--output_dir={tmp_path / 'new'}", "--weights=raw")
    with pytest.raises(UserError, match="conv_in.weight, 0$"):
        run_script("import_weights", str(tmp_path / "one.pt"), f"--output_dir={tmp_path / 'new'}")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    with pytest.raises(UserError, match="array.npz cannot be read"):
        run_script("import_weights", str(tmp_path / "array.npz"), f"--output_dir={tmp_path / 'new'}")


def test_a_checkpoint_of_tensorflow_is_known_by_the_beginning_of_its_name(tmp_path):
    (tmp_path / "model.ckpt-790000.index").touch()
    with pytest.raises(UserError, match="model.ckpt-790000 is a TensorFlow checkpoint: turn it into an .npz"):
        run_script("import_weights", str(tmp_path / "model.ckpt-790000"), f"--output_dir={tmp_path / 'new'}")


def improved_weights(scale_shift: bool, out_channels: int) -> dict[str, torch.Tensor]:
    """Names and shapes of improved-diffusion: 32 and 64 channels, attention at the second level, one block a level."""
    shapes = {}

    def add(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    def block(name: str, channels: int, width: int) -> None:
        add(f"{name}.in_layers.0", channels)
        add(f"{name}.in_layers.2", width, channels, 3, 3)
        add(f"{name}.emb_layers.1", 2 * width if scale_shift else width, 128)
        add(f"{name}.out_layers.0", width)
        add(f"{name}.out_layers.3", width, width, 3, 3)
        if channels != width:
            add(f"{name}.skip_connection", width, channels, 1, 1)

    def attention(name: str, width: int) -> None:
        add(f"{name}.norm", width)
        add(f"{name}.qkv", 3 * width, width, 1)
        add(f"{name}.proj_out", width, width, 1)

    add("time_embed.0", 128, 32)
    add("time_embed.2", 128, 128)
    add("input_blocks.0.0", 32, 3, 3, 3)
    block("input_blocks.1.0", 32, 32)
    add("input_blocks.2.0.op", 32, 32, 3, 3)
    block("input_blocks.3.0", 32, 64)
    attention("input_blocks.3.1", 64)
    block("middle_block.0", 64, 64)
    attention("middle_block.1", 64)
    block("middle_block.2", 64, 64)
    block("output_blocks.0.0", 128, 64)
    attention("output_blocks.0.1", 64)
    block("output_blocks.1.0", 96, 64)
    attention("output_blocks.1.1", 64)
    add("output_blocks.1.2.conv", 64, 64, 3, 3)
    block("output_blocks.2.0", 96, 32)
    block("output_blocks.3.0", 64, 32)
    add("out.0", 32)
    add("out.2", out_channels, 32, 3, 3)
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    randomize(weights.items())
    return weights


def improved_output(w: dict[str, torch.Tensor], x: torch.Tensor, t: torch.Tensor, heads: int = 4) -> torch.Tensor:
    """The network of Nichol & Dhariwal (2021) with these weights, from its description."""

    def linear(name, x):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def conv(name, x, **options):
        kernel = w[f"{name}.weight"]
        return F.conv2d(x, kernel, w[f"{name}.bias"], padding=kernel.shape[-1] // 2, **options)

    def norm(name, x):
        return F.group_norm(x, 32, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)

    def block(name, x):
        h = conv(f"{name}.in_layers.2", F.silu(norm(f"{name}.in_layers.0", x)))
        e = linear(f"{name}.emb_layers.1", F.silu(embedding))[:, :, None, None]
        if e.shape[1] == 2 * h.shape[1]:
            scale, shift = e.chunk(2, dim=1)
            h = norm(f"{name}.out_layers.0", h) * (1 + scale) + shift
        else:
            h = norm(f"{name}.out_layers.0", h + e)
        skip = conv(f"{name}.skip_connection", x) if f"{name}.skip_connection.weight" in w else x
        return skip + conv(f"{name}.out_layers.3", F.silu(h))

    def attention(name, x):
        weight, width = w[f"{name}.qkv.weight"][..., 0], x.shape[1] // heads
        qkv = torch.einsum("oc,bcn->bon", weight, norm(f"{name}.norm", x).flatten(2)) + w[f"{name}.qkv.bias"][:, None]
        outputs = []
        for head in qkv.split(3 * width, dim=1):
            q, k, v = head.split(width, dim=1)
            outputs.append(v @ (q.mT @ k / math.sqrt(width)).softmax(dim=-1).mT)
        h = torch.einsum("oc,bcn->bon", w[f"{name}.proj_out.weight"][..., 0], torch.cat(outputs, dim=1))
        return x + (h + w[f"{name}.proj_out.bias"][:, None]).reshape(x.shape)

    frequencies = 10000 ** (-torch.arange(16) / 16)
    angles = t[:, None] * frequencies
    embedding = linear("time_embed.2", F.silu(linear("time_embed.0", torch.cat([angles.cos(), angles.sin()], dim=1))))
    first = conv("input_blocks.0.0", x)
    second = block("input_blocks.1.0", first)
    third = conv("input_blocks.2.0.op", second, stride=2)
    fourth = attention("input_blocks.3.1", block("input_blocks.3.0", third))
    h = block("middle_block.2", attention("middle_block.1", block("middle_block.0", fourth)))
    h = attention("output_blocks.0.1", block("output_blocks.0.0", torch.cat([h, fourth], dim=1)))
    h = attention("output_blocks.1.1", block("output_blocks.1.0", torch.cat([h, third], dim=1)))
    h = conv("output_blocks.1.2.conv", h.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))
    h = block("output_blocks.2.0", torch.cat([h, second], dim=1))
    h = block("output_blocks.3.0", torch.cat([h, first], dim=1))
    return conv("out.2", F.silu(norm("out.0", h)))


class TestImprovedDiffusion:
    @pytest.mark.parametrize("scale_shift", [True, False])
    @pytest.mark.parametrize("heads", [1, 4])
    def test_output(self, import_weights, scale_shift, heads):
        weights = improved_weights(scale_shift, out_channels=3)
        pipeline = import_weights(weights, f"--num_heads={heads}")
        assert largest_error(pipeline, lambda x, t: improved_output(weights, x, t, heads)) < 1e-5

    def test_its_variance_is_left_out(self, import_weights, capsys):
        weights = improved_weights(scale_shift=True, out_channels=6)
        pipeline = import_weights(weights)
        assert largest_error(pipeline, lambda x, t: improved_output(weights, x, t)[:, :3]) < 1e-5
        assert "predicts its variance too: that half of its output is left out" in capsys.readouterr().err

    def test_every_fourth_of_4000_steps(self, import_weights):
        flags = "--ddpm_num_steps=4000", "--ddpm_beta_schedule=cosine"
        scheduler = import_weights(improved_weights(True, 6), *flags).scheduler
        t = np.arange(0, 4000, 4)
        f = np.cos((np.append(t + 1, 0) / 4000 + 0.008) / 1.008 * np.pi / 2) ** 2
        # Up to the clipping of the last betas.
        np.testing.assert_allclose(scheduler.alphas_cumprod[:990].numpy(), (f[:-1] / f[-1])[:990], rtol=2e-3)
        assert scheduler.config.num_train_timesteps == 1000
        for steps in (10, 1500):
            with pytest.raises(UserError, match=f"--ddpm_num_steps {steps}: .* need a multiple of 1000"):
                scheduler_for(PROJECTS[3], "linear", steps, "fixed_small")

    @pytest.mark.parametrize("steps", [1000, 2000, 4000])
    def test_linear_betas_are_scaled_by_1000_over_T(self, steps, import_weights):
        scheduler = import_weights(improved_weights(True, 6), f"--ddpm_num_steps={steps}").scheduler
        betas = np.linspace(0.1 / steps, 20 / steps, steps)
        expected = np.cumprod(1 - betas)[:: steps // 1000]
        np.testing.assert_allclose(scheduler.alphas_cumprod.numpy(), expected, rtol=1e-5)

    def test_heads_that_one_number_cannot_describe(self, import_weights):
        weights = improved_weights(True, 3)
        with pytest.raises(UserError, match="3 heads in attentions of 64 channels: UNet2DModel has one number"):
            import_weights(weights, "--num_heads=3")

    def test_classes(self, import_weights):
        weights = improved_weights(True, 3) | {"label_emb.weight": torch.zeros(10, 128)}
        with pytest.raises(UserError, match="conditional on classes"):
            import_weights(weights)

    def test_networks_that_enlarge_an_image(self, import_weights):
        weights = improved_weights(True, 6) | {"input_blocks.0.0.weight": torch.zeros(32, 6, 3, 3)}
        with pytest.raises(UserError, match="super-resolution: its input has 6 channels"):
            import_weights(weights)

    def test_the_number_of_heads_is_said(self, import_weights, capsys, tmp_path):
        import_weights(improved_weights(True, 3), "--num_heads=2")
        assert "variance fixed_large, 2 head(s)" in capsys.readouterr().err
        assert "2 head(s)" in (tmp_path / "imported/README.md").read_text()


class Planted:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('marker').touch()",)


class TestFiles:
    def test_a_pickle_with_code_is_refused(self, import_weights, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match="holds more than tensors, and is not loaded: a pickle can hold code"):
            import_weights({"conv_in.weight": torch.zeros(1), "planted": Planted()})
        assert not (tmp_path / "marker").exists()
        (tmp_path / "array.npz").write_bytes(pickle.dumps(Planted()))
        with pytest.raises(UserError, match="cannot be read"):
            run_script("import_weights", str(tmp_path / "array.npz"), "--output_dir=x")
        assert not (tmp_path / "marker").exists()

    def test_a_file_of_something_else(self, tmp_path):
        (tmp_path / "text.pt").write_text("epoch 3")
        with pytest.raises(UserError, match=r"text.pt is no file of weights that torch can read \(\w+Error\)"):
            run_script("import_weights", str(tmp_path / "text.pt"), f"--output_dir={tmp_path / 'x'}")

    def test_other_weights(self, import_weights, original):
        with pytest.raises(UserError, match=r"of no project that is known here \(.*\): a, b"):
            import_weights({"a": torch.zeros(1), "b": torch.zeros(1)})
        incomplete = under_port_names(original)
        del incomplete["down.1.attn.0.q.bias"]
        with pytest.raises(
            UserError, match="cannot hold this network: down_blocks.1.attentions.0.to_q.bias is missing"
        ):
            import_weights(incomplete)
        with pytest.raises(UserError, match="cannot hold this network: extra has no place"):
            import_weights(under_port_names(original) | {"extra": torch.zeros(1)})
        wrong = under_port_names(original) | {"conv_in.bias": torch.zeros(7)}
        with pytest.raises(UserError, match=r"conv_in.bias is \[7\] where \[32\] is needed"):
            import_weights(wrong)

    def test_a_folder_that_is_not_empty(self, import_weights, original):
        import_weights(under_port_names(original))
        with pytest.raises(UserError, match="must be a new or empty folder"):
            import_weights(under_port_names(original))

    def test_generate_and_evaluate_take_it(self, import_weights, original, tmp_path, cache_dir):
        import_weights(under_port_names(original))
        folder = tmp_path / "imported"
        card = (folder / "README.md").read_text()
        assert "a file of pesser/pytorch_diffusion" in card
        few = "--ddim", "--num_inference_steps=2", "--num_images=2"
        run_script("generate", str(folder), *few, f"--output_dir={tmp_path / 'images'}")
        assert len([*(tmp_path / "images" / "images").glob("*.png")]) == 2
        logging.getLogger().handlers.clear()
