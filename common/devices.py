"""Copies between the host and a device that do not wait for the work the device still has to do."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From pinned memory a copy to a GPU does not wait for the work before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Arriving:
    """A tensor on its way to the host: asked for, it waits for its own copy and for nothing queued after it."""

    def __init__(self, tensor: torch.Tensor):
        self._arrived: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._on_host = tensor.clone()
        else:
            self._on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
            self._on_host.copy_(tensor, non_blocking=True)
            self._arrived = torch.Event(tensor.device)
            self._arrived.record()

    def get(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._on_host
