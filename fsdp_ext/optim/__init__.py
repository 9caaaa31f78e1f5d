"""Optimizers and clipping over flat memory, with the interface of PyTorch's.

``AdamW``, ``Adam``, ``SGD`` and ``Muon`` are subclasses of those in ``torch.optim``, with the same
arguments, states and results. The first three step flat memory: start with ``flat_step.py``.
``muon.py`` steps whole matrices. ``clip.py`` has ``fsdp_ext.clip_grad_norm_``.
"""

from fsdp_ext.optim.optimizers import SGD, Adam, AdamW, Muon

__all__ = ["SGD", "Adam", "AdamW", "Muon"]
