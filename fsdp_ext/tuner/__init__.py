"""Which settings are fastest: ``tune`` measures, asks the planner, and lets settings race.

It imports everything below it: ``planner``, ``profiler`` and ``sharding``. Start with ``api.py``,
then ``costs.py`` (what is measured) and ``race.py`` (which setting is tried how often).
"""
