"""Optimizers and clipping over flat memory, with the interface of PyTorch's.

``AdamW``, ``Adam`` and ``SGD`` are subclasses of those in ``torch.optim``, with the same arguments,
states and results: start with ``flat_step.py``. ``clip.py`` has ``fsdp_ext.clip_grad_norm_``.
"""

from fsdp_ext.optim.optimizers import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]
