"""The devices for tests: the host, and a GPU if the build and the machine have one."""

from __future__ import annotations

import torch

from fsdp_ext import _build_info

HAS_GPU = _build_info.BUILD_KIND == "CUDA" and torch.cuda.is_available()
if HAS_GPU:
    torch.cuda.init()
# tests/emulated_gpu: kernels of the host, in a GPU's place.
IS_EMULATED = HAS_GPU and torch.cuda.get_device_name(0) == "Emulated GPU"
DEVICES = [torch.device("cpu"), *([torch.device("cuda", 0)] if HAS_GPU else [])]
