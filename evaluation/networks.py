"""The networks whose features are compared, each with the way it wants its images."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from common.errors import UserError, reason_of, reason_of_hub
from common.files import check_layers, sha256
from evaluation.evaluate_options import EvaluationOptions

PUBLISHED = {"dinov2": "facebook/dinov2-large", "clip": "openai/clip-vit-base-patch32"}
VGG16_SIZE = 224
LARGEST_SIDE = 4096  # of what a network is shown


@dataclass
class FeatureNetwork:
    """A network from images to features. `resize` is for each image on the CPU, `compute` for a batch on the device."""

    name: str  # inception, dinov2, ...
    mode: str  # how images are resized
    digest: str  # of the weights
    network: nn.Module
    scale: Callable[[torch.Tensor], torch.Tensor]  # of a batch: what is left to do of resizing and normalising
    resize: Callable[[np.ndarray], np.ndarray] | None = None  # uint8 [height, width, 3] to float32
    precision: torch.dtype = torch.float32

    @property
    def has_logits(self) -> bool:
        """Return whether there is a last layer, which the Inception Score needs."""
        return getattr(self.network, "fc", None) is not None

    @property
    def precision_name(self) -> str:
        """Return the precision as it is filed with statistics."""
        name = str(self.precision).removeprefix("torch.")
        return f"{name} with TF32" if torch.backends.cuda.matmul.allow_tf32 else name

    def resized(self, image: np.ndarray) -> torch.Tensor:
        """Return an image, uint8 [height, width, 3], as `compute` takes it: [3, height, width]."""
        return torch.from_numpy(image if self.resize is None else self.resize(image)).permute(2, 0, 1)

    def compute(self, images: torch.Tensor, precision: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return of images [n, 3, height, width] of 0..255, in float32: features, perhaps spatial ones and logits."""
        precision = precision or self.precision
        inputs = self.scale(images.float()).contiguous(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, precision, enabled=precision != torch.float32):
            outputs = self.network(inputs)
        outputs = outputs if isinstance(outputs, dict) else {"features": outputs}
        return {name: output.float() for name, output in outputs.items()}


def load_networks(options: EvaluationOptions, cache_dir: Path, device: torch.device) -> list[FeatureNetwork]:
    """Load what `--features` names, once for each mode in which it is to see the images."""
    path = Path(options.features).expanduser()
    if options.features == "inception":
        networks = inception_networks(options, cache_dir, device)
    elif path.is_file():
        networks = [vgg16_network(path, device)]
    elif options.features in PUBLISHED or path.is_dir():
        networks = [transformers_network(options.features, device)]
    else:
        raise UserError(
            f"--features {options.features}: neither inception, {', '.join(PUBLISHED)}, nor a folder with a vision "
            f"model of transformers, nor a file with VGG16's weights"
        )
    if options.mixed_precision == "bf16":
        networks = [replace(network, precision=torch.bfloat16) for network in networks]
    return networks


def inception_networks(options: EvaluationOptions, cache_dir: Path, device: torch.device) -> list[FeatureNetwork]:
    """Return Inception in some of clean-fid's three modes: one network, which sees other pixels in each."""
    from evaluation.inception import load_inception

    network, digest = load_inception(options.inception_weights, cache_dir)
    network = network.to(device, memory_format=torch.channels_last)
    resizing = {
        "legacy_tensorflow": (None, resize_like_tensorflow),
        "clean": (bicubic_resizer(299), lambda images: (images - 128) / 128),
        "legacy_pytorch": (None, resize_like_pytorch),
    }
    return [
        FeatureNetwork("inception", mode, digest, network, resize=resizing[mode][0], scale=resizing[mode][1])
        for mode in options.modes
    ]


def resize_like_tensorflow(images: torch.Tensor) -> torch.Tensor:
    """Resize as TensorFlow 1 does, bilinear with pixels that have no width, and normalise as its graph does."""
    return (bilinear_like_tensorflow(images, 299) - 128) / 128


def bilinear_like_tensorflow(images: torch.Tensor, size: int) -> torch.Tensor:
    from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

    return interpolate_bilinear_2d_like_tensorflow1x(images, size=(size, size), align_corners=False)


def resize_like_pytorch(images: torch.Tensor) -> torch.Tensor:
    """Do what pytorch-fid does: bilinear without antialiasing, and 2 x / 255 - 1."""
    resized = nn.functional.interpolate(images, size=(299, 299), mode="bilinear", align_corners=False)
    return resized.clamp(0, 255) / 255 * 2 - 1


def bicubic_resizer(size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return clean-fid's resizer: each channel as float through Pillow's antialiased bicubic filter, never rounded."""
    from cleanfid.resize import make_resizer

    return make_resizer("PIL", quantize_after=False, filter="bicubic", output_size=(size, size))


def normaliser(mean: Sequence[float], deviation: Sequence[float], device: torch.device) -> Callable:
    """Return a function from values of 0..255 to those that a network was trained on."""
    mean, deviation = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, deviation))
    return lambda images: (images / 255 - mean) / deviation


class VisionModel(nn.Module):
    """A vision model of transformers as a network of features: the projected image for CLIP, else the pooled token."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs = self.model(pixel_values=images)
        if "image_embeds" in outputs:
            return outputs.image_embeds
        pooled = outputs.get("pooler_output")
        return (outputs.last_hidden_state[:, 0] if pooled is None else pooled).flatten(1)


def transformers_network(features: str, device: torch.device) -> FeatureNetwork:
    """Load DINOv2, CLIP or another vision model. Images are resized whole: to crop them would hide their borders."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, CLIPVisionModelWithProjection, PreTrainedConfig

    from evaluation.inception import digest_of

    source = PUBLISHED.get(features, features)
    try:
        check_layers(PreTrainedConfig.get_config_dict(source)[0])
        kind = AutoConfig.from_pretrained(source, trust_remote_code=False).model_type
        model_class = CLIPVisionModelWithProjection if kind.startswith("clip") else AutoModel
        as_data = {"trust_remote_code": False, "use_safetensors": True}  # no class that travels with it, no pickle
        model = model_class.from_pretrained(source, **as_data).eval().requires_grad_(False)
        processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
        size = next(iter(dict(getattr(processor, "crop_size", None) or processor.size).values()))
        scale = normaliser(processor.image_mean, processor.image_std, device)
        if not (1 <= size <= LARGEST_SIDE and min(processor.image_std) > 0):
            raise ValueError(f"its images have size {size} and deviation {processor.image_std}")
    except Exception as error:  # of the Hub, of the network, or whatever a damaged file runs into
        reason = reason_of(error) if Path(source).is_dir() else reason_of_hub(error)
        raise UserError(
            f"--features {features}: {source} could not be loaded ({reason}); name a folder that holds config.json, "
            f"model.safetensors and preprocessor_config.json"
        ) from error
    return FeatureNetwork(
        name=features if features in PUBLISHED else re.sub(r"\W+", "_", Path(features).resolve().name),
        mode=f"clean-{size}",
        digest=digest_of(model.state_dict()),
        network=VisionModel(model).to(device),
        resize=bicubic_resizer(size),
        scale=scale,
    )


def vgg16_network(path: Path, device: torch.device) -> FeatureNetwork:
    """Load torchvision's VGG16 with the weights of a file, to be fed as torch-fidelity feeds it."""
    from torchvision.models import vgg16

    with torch.device("meta"):
        model = vgg16()
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), assign=True)
    except Exception as error:  # of whatever kind a file that is no state causes
        raise UserError(f"--features {path}: not the state of torchvision's VGG16") from error
    # To the second fully connected layer and its ReLU, where precision and recall were first measured.
    network = nn.Sequential(model.features, model.avgpool, nn.Flatten(), model.classifier[:5])
    normalise = normaliser((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), device)  # of ImageNet
    return FeatureNetwork(
        name="vgg16",
        mode=f"tensorflow-{VGG16_SIZE}",
        digest=sha256(path),
        network=network.eval().requires_grad_(False).to(device, memory_format=torch.channels_last),
        scale=lambda images: normalise(bilinear_like_tensorflow(images, VGG16_SIZE)),
    )
