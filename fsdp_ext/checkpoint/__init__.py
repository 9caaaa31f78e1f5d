"""Checkpoints, from the flat shards and back."""

from fsdp_ext.checkpoint.api import async_save, latest, load, save
from fsdp_ext.checkpoint.background import Saving
from fsdp_ext.checkpoint.ranks import OtherRanksError
from fsdp_ext.checkpoint.tensor_files import DamagedFileError

__all__ = [
    "DamagedFileError",
    "OtherRanksError",
    "Saving",
    "async_save",
    "latest",
    "load",
    "save",
]
