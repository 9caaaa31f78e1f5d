"""FSDP1's wrapper class, built on ``fully_shard``.

It may import ``sharding``, ``comm`` and ``_util``. Start reading with ``wrapper.py``, then
``setup.py`` (what FSDP1's arguments mean).
"""
