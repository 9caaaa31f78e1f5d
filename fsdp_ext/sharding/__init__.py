"""Sharding itself: ``fully_shard``, the units that it makes, and the root that runs them.

It may import ``comm``, ``_util`` and the C++ extension, whose ``csrc/torch`` has what runs in a
step. Start reading with ``api.py``, then ``unit.py`` (one unit's parameters) and ``root.py`` (all
units of a model, from the first forward on).
"""
