"""``profile``: records what a step's communication cost, and explains why it was exposed.

It may import ``sharding``, ``comm`` and ``_util``; no training step depends on it. Start reading
with ``api.py``, then ``recording.py`` (spans and iterations) and ``causes.py`` (causes and
remedies).
"""
