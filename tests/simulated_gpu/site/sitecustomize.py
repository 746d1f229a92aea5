"""In every Python process with this folder on its path: the simulated device, before anything else imports torch."""

import os

if os.environ.get("SIMULATED_GPU"):
    from tests.simulated_gpu import torch_cuda  # noqa: F401
