"""``verify``: shows whether a user's model trains as it does unsharded.

Start reading with ``api.py``, then ``checks.py`` (what is tried), ``steps.py`` (two copies that
train side by side), ``comparison.py`` (the first difference) and ``expected_gradients.py``.
"""
