"""What is derived is verified when it is read, and made again, with a line, if it is not what was written."""

import logging
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.files import load_safetensors, save_safetensors, written_aside
from conditions.text_encoder import EncodedCaptions, TextEncoder
from conditions.training_condition import encode_captions
from evaluation.metrics import Moments
from evaluation.statistics import Identity, Statistics, _from_cache, _path_in_cache, save_statistics
from run_folder.config import ConditionalConfig

IDENTITY = Identity("photos", "train", 20, 8, 8, 3, True, "f" * 8, "inception", "clean", "0" * 64, "float32")


def damage(path, position: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_or_not_at_all(tmp_path, dtype):
    tensors = {"a": torch.arange(6).view(2, 3).to(dtype), "b": torch.ones((), dtype=dtype), "c": torch.ones(0, 3)}
    path = tmp_path / "file.safetensors"
    save_safetensors(tensors, path, {"of": "somebody"})
    read, metadata = load_safetensors(path)
    assert metadata == {"of": "somebody"}
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    whole = path.read_bytes()
    for position in (-1, len(whole) // 2, whole.index(b"somebody"), whole.index(b'"a"') + 1, 0):
        path.write_bytes(whole)
        damage(path, position)
        with pytest.raises(OSError):  # noqa: PT011
            load_safetensors(path)
    save_file(tensors, path)  # by another program, without a checksum
    with pytest.raises(OSError, match="it is not what was written"):
        load_safetensors(path)


def test_statistics(tmp_path, caplog):
    path = _path_in_cache(IDENTITY, tmp_path)
    assert _from_cache(IDENTITY, tmp_path) is None
    assert caplog.text == ""
    save_statistics(Statistics(IDENTITY, Moments(torch.zeros(4), torch.eye(4)), None, torch.rand(20, 4)), path)
    assert _from_cache(IDENTITY, tmp_path).identity == IDENTITY
    damage(path)
    assert _from_cache(IDENTITY, tmp_path) is None
    assert f"{path} is made again: it is not what was written" in caplog.text
    save_statistics(Statistics(replace(IDENTITY, count=21), Moments(torch.zeros(4), torch.eye(4))), path)
    assert _from_cache(IDENTITY, tmp_path) is None
    assert "is made again: it is of other images" in caplog.text


def test_captions(text_encoder, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    encoder, captions = TextEncoder(str(text_encoder), torch.device("cpu")), ["a digit", "the digit seven"]
    path = encoder.encode_once(captions, tmp_path)
    states = EncodedCaptions(path)(torch.tensor([0, 1]))[0].clone()  # not the mapped file, which is damaged next
    before = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for position in (-3, 9):
        damage(path, position)
        assert encoder.encode_once(captions, tmp_path) == path
        assert f"{path} is made again: " in caplog.text
        caplog.clear()
        assert all(torch.equal(load_file(path)[name], tensor) for name, tensor in before.items())
    encoder.encode_once(captions, tmp_path)
    assert caplog.text == ""
    assert torch.equal(EncodedCaptions(path)(torch.tensor([0, 1]))[0], states)


def test_writers_with_the_same_process_number_keep_apart(tmp_path):
    """As on two machines that share a folder: each has a temporary file of its own, and the later one stays."""
    path = tmp_path / "file"
    with written_aside(path) as first, written_aside(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert first != second
    assert path.read_text() == "first"  # which was the last to end
    assert [*tmp_path.iterdir()] == [path]


def test_a_machine_reads_captions_from_its_own_cache(text_encoder, tmp_path):
    """What the main process of another machine has encoded is in a folder that need not exist here."""
    there, here = (ConditionalConfig(text_encoder=str(text_encoder), cache_dir=str(tmp_path / name)) for name in "ab")
    gathered = []
    processes = SimpleNamespace(is_local_main=True, device=torch.device("cpu"))
    processes.all_gather = lambda found: gathered.append(found) or gathered
    encode_captions(there, ["seven"], ["seven"], processes)
    shutil.move(tmp_path / "a", tmp_path / "of the other machine")
    (tmp_path / "b").mkdir()
    condition = encode_captions(here, ["seven"], ["seven"], processes)  # which opens the files
    assert condition.description["prompts"] == ["seven"]
    assert gathered[0] == gathered[1]
