"""Pipelines of class-conditional and text-to-image models. This file travels with every such model:

    pipeline = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)

It therefore needs torch and diffusers alone, and nothing else of the project it comes from.
"""

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor

ENCODED_TOGETHER = 256


def guide(
    conditional: torch.Tensor,
    unconditional: torch.Tensor,
    scale: float,
    rescale: float = 0.0,
    channels: int | None = None,
) -> torch.Tensor:
    """Classifier-free guidance: u + scale (c - u), in the convention of diffusers, where a scale of 1 is no guidance.

    `rescale` is the share of the result that gets the deviation of the conditional prediction back (Lin et al. 2024,
    eq. 15 and 16), against the glare of large scales. What follows the `channels` of an image is a learned variance,
    which stays the conditional one.
    """
    if channels and conditional.shape[1] > channels:
        predictions = conditional[:, :channels], unconditional[:, :channels]
        return torch.cat([guide(*predictions, scale, rescale), conditional[:, channels:]], dim=1)
    guided = unconditional + scale * (conditional - unconditional)
    if rescale:
        deviations = [prediction.flatten(1).std(1)[:, None, None, None] for prediction in (conditional, guided)]
        guided = guided * (rescale * deviations[0] / deviations[1] + 1 - rescale)
    return guided


def most_tokens(tokenizer, text_encoder) -> int:
    """Return how many tokens of a prompt are encoded; what follows is left out."""
    return min(tokenizer.model_max_length, getattr(text_encoder.config, "max_position_embeddings", 512))


@torch.no_grad()
def encode_prompts(
    tokenizer, text_encoder, prompts: list[str], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoder's last hidden states, [prompts, tokens, width], and which tokens are each prompt's, 1 or 0.

    The encoder computes on the device; the result is on the host. Only prompts of the same number of tokens are
    encoded together, without padding, so that the states of one do not depend on the others.
    """
    longest = most_tokens(tokenizer, text_encoder)
    tokens = tokenizer(prompts, truncation=True, max_length=longest)["input_ids"]
    lengths = torch.tensor([len(ids) for ids in tokens])
    mask = torch.arange(lengths.max()) < lengths[:, None]
    states = torch.zeros(*mask.shape, text_encoder.config.hidden_size)
    for length in lengths.unique().tolist():
        for some in torch.nonzero(lengths == length).flatten().split(ENCODED_TOGETHER):
            ids = torch.tensor([tokens[index] for index in some.tolist()], device=device)
            encoded = text_encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            states[some, :length] = encoded.to(states)
    return states, mask.long()


class ConditionalDDPMPipeline(DiffusionPipeline):
    """Ancestral sampling with guidance, which both kinds of condition share."""

    @torch.no_grad()
    def _sample(
        self,
        conditions: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
        guidance_scale: float = 1.0,
        guidance_rescale: float = 0.0,
        num_inference_steps: int = 1000,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """Draw an image for each row of the network's inputs: those with the condition, and those without it."""
        conditional, unconditional = conditions
        count, size = len(next(iter(conditional.values()))), self.unet.config.sample_size
        shape = (count, self.unet.config.in_channels, size, size)
        samples = randn_tensor(shape, generator=generator, device=self._execution_device, dtype=self.unet.dtype)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.progress_bar(self.scheduler.timesteps):
            prediction = self.unet(samples, t, **conditional).sample
            if guidance_scale != 1:
                without = self.unet(samples, t, **unconditional).sample
                prediction = guide(prediction, without, guidance_scale, guidance_rescale, shape[1])
            samples = self.scheduler.step(prediction, t, samples, generator=generator).prev_sample
        images = (samples / 2 + 0.5).clamp(0, 1).cpu().permute(0, 2, 3, 1).float().numpy()
        return ImagePipelineOutput(images=self.numpy_to_pil(images) if output_type == "pil" else images)


class ClassConditionalDDPMPipeline(ConditionalDDPMPipeline):
    """An image for each class asked for, by name or number; `id2label` are the names."""

    model_cpu_offload_seq = "unet"

    def __init__(self, unet, scheduler, id2label: dict[str, str] | None = None):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)
        self.register_to_config(id2label=id2label)

    def __call__(
        self, class_labels: str | int | list[str | int], guidance_scale: float = 1.0, **sampling
    ) -> ImagePipelineOutput:
        """Draw the images. `sampling`: guidance_rescale, num_inference_steps, generator, output_type."""
        numbers = {name: int(number) for number, name in (self.config.id2label or {}).items()}
        classes = self.unet.config.num_class_embeds - 1  # the last row stands for no class
        wanted = [class_labels] if isinstance(class_labels, str | int) else class_labels
        for label in wanted:
            if label not in numbers and not (isinstance(label, int) and 0 <= label < classes):
                names = f", or one of {', '.join(numbers)}" if numbers else ""
                raise ValueError(f"class_labels: {label!r} is no class; give a number from 0 to {classes - 1}{names}")
        labels = torch.tensor([numbers.get(label, label) for label in wanted], device=self._execution_device)
        none = torch.full_like(labels, classes)
        return self._sample(({"class_labels": labels}, {"class_labels": none}), guidance_scale, **sampling)


class TextToImageDDPMPipeline(ConditionalDDPMPipeline):
    """An image for each prompt."""

    model_cpu_offload_seq = "text_encoder->unet"

    def __init__(self, unet, scheduler, text_encoder, tokenizer):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, text_encoder=text_encoder, tokenizer=tokenizer)

    def __call__(
        self, prompt: str | list[str], negative_prompt: str = "", guidance_scale: float = 1.0, **sampling
    ) -> ImagePipelineOutput:
        """Draw the images. `sampling`: guidance_rescale, num_inference_steps, generator, output_type."""
        prompts = [prompt] if isinstance(prompt, str) else prompt
        conditions = self._encode(prompts), self._encode([negative_prompt] * len(prompts))
        return self._sample(conditions, guidance_scale, **sampling)

    def _encode(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        device = self._execution_device
        states, mask = encode_prompts(self.tokenizer, self.text_encoder, prompts, device)
        return {"encoder_hidden_states": states.to(device, self.unet.dtype), "encoder_attention_mask": mask.to(device)}
