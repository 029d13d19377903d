"""The least that a training step can be: forward, backward, clip and Adam on tensors in memory, without end.

python -m benchmarks.stepping benchmarks/bare_loop.py NETWORK BATCH_SIZE
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from diffusers import UNet2DModel  # noqa: E402

from common.machine import usable_cores  # noqa: E402


def main() -> None:
    network, batch_size = sys.argv[1], int(sys.argv[2])
    if "OMP_NUM_THREADS" not in os.environ:  # as the project does
        torch.set_num_threads(max(1, int(usable_cores())))
    unet = UNet2DModel.from_config(UNet2DModel.load_config(network))
    optimizer = torch.optim.Adam(unet.parameters(), lr=2e-4, fused=True)
    size = unet.config.sample_size
    images, noise = (torch.randn(batch_size, unet.config.in_channels, size, size) for _ in range(2))
    t = torch.randint(1000, (batch_size,))
    while True:
        torch.nn.functional.mse_loss(unet(images, t).sample, noise).backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
