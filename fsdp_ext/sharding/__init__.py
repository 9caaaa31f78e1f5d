"""Sharding itself: ``fully_shard``, the units that it makes, and the root that runs them.

It imports ``_util`` and ``comm``; no other package is known here. Start with ``api.py``, then
``unit.py`` (one unit's parameters) and ``root.py`` (all units of a model, from the first forward
on); what runs in a step is in ``csrc/torch``.
"""
