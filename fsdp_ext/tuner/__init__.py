"""``tune``: finds the fastest settings by measurement and by a model of the schedule.

It may import every other package of fsdp_ext, and none of them imports it. Start reading with
``api.py`` (what is tried), then ``costs.py`` (what is measured) and ``trial.py``.
"""
