"""What training would take before it starts: ``plan``, its sizes, and the model of the schedule.

It imports ``sharding`` and what is below it. Start with ``api.py``, then ``sizes.py`` (memory) and
``schedule.py`` (time).
"""
