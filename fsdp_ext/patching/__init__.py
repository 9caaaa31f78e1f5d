"""``patch``: fsdp_ext in the place of PyTorch's FSDP, for code that imports PyTorch's.

Start reading with ``api.py``.
"""
