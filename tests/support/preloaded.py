"""What the server of launcher.py imports, so that the ranks that it forks need not import it."""

from __future__ import annotations

import gc

import numpy  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401

import fsdp_ext  # noqa: F401
from support import parity, rank_process  # noqa: F401

# All of it lives for ever, so the collector of a rank need not look at it.
gc.collect()
gc.freeze()
