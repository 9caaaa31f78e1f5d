"""How ranks communicate: transports, lanes, and what a collective costs over a link.

It may import ``_util`` and the C++ extension, and knows nothing of modules and parameters. Start
reading with ``transports.py`` (which transport a group of ranks uses), then ``lanes.py`` (the
streams and communicators) and ``simulated.py`` (ranks that do not exist, over a ``Link``).
"""
