"""FSDP1's wrapper class, built on ``fully_shard``.

It imports ``sharding`` and what is below it. Start with ``wrapper.py``; ``setup.py`` translates
FSDP1's arguments.
"""
