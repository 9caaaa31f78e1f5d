"""``plan``: the memory and the time of a training before it starts.

It may import ``optim``, ``sharding``, ``comm`` and ``_util``. Start reading with ``api.py``, then
``sizes.py`` (memory) and ``schedule.py`` (the model of a step's time).
"""
