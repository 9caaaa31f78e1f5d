"""What a step's communication cost, and why: ``profile`` and its reports.

It imports ``sharding`` and what is below it, and no step depends on it. Start with ``api.py``, then
``recording.py`` (what the C++ ledger wrote down) and ``causes.py`` (why communication was exposed).
"""
