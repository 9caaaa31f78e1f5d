"""``offload_optimizer``: only the optimizer's states in the host's memory.

It may import ``optim``, ``sharding`` and ``_util``. Start reading with ``api.py``, then
``states.py`` (Note [offloaded states]).
"""
