"""Sharding itself: ``fully_shard``, the units that it makes, and the root that runs them.

It may import ``comm``, ``_util`` and the C++ extension, whose ``csrc/torch`` runs the steps. From
the bottom up:

- ``params``: parameters, their shards, and the settings of a unit
- ``root``: ``unit.py`` (one unit), ``root.py`` (all units of a model, from the first forward on)
- ``torch_compat``: what PyTorch's own code looks for on a sharded module
- ``api``: ``entry.py`` has ``fully_shard``, ``fsdp_module.py`` the methods of a sharded module
"""
