"""Write tests/fixtures/checkpoint-v1, once for a format: a later version of the program must load it.

python tests/make_fixture.py
"""

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from conftest import make_tiny_flags, make_tiny_network  # noqa: E402

import train_unconditional  # noqa: E402
from run_folder.checkpoints import FORMAT_VERSION  # noqa: E402

if __name__ == "__main__":
    target = Path(__file__).parent / "fixtures" / f"checkpoint-v{FORMAT_VERSION}"
    with tempfile.TemporaryDirectory() as name:
        network = make_tiny_network(Path(name) / "network", block_out_channels=(4, 4))
        flags = make_tiny_flags(network, Path(name) / "cache")
        sys.argv = ["train_unconditional.py", *flags, "--max_train_steps=3", f"--output_dir={name}/run"]
        train_unconditional.main()
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(Path(name) / "run" / "checkpoint-3", target)
    print(f"wrote {target}")
