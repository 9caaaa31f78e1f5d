"""``tune``: finds the fastest settings by measurement and by a model of the schedule.

It may import every other package of fsdp_ext, and none of them imports it. Start reading with
``api.py``, then ``costs.py`` (what is measured), ``candidates.py`` and ``trial.py``.
"""
