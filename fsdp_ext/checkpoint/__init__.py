"""Checkpoints: weights and optimizer states in files, and from files.

See docs/checkpoints.md.
"""

from fsdp_ext.checkpoint.api import async_save, latest, load, save
from fsdp_ext.checkpoint.background import Saving
from fsdp_ext.checkpoint.hugging_face import export
from fsdp_ext.checkpoint.pretrained import load_pretrained
from fsdp_ext.checkpoint.ranks import OtherRanksError
from fsdp_ext.checkpoint.stream import stream_weights
from fsdp_ext.checkpoint.tensor_files import DamagedFileError

__all__ = [
    "DamagedFileError",
    "OtherRanksError",
    "Saving",
    "async_save",
    "export",
    "latest",
    "load",
    "load_pretrained",
    "save",
    "stream_weights",
]
