"""How ranks communicate: transports, lanes, and what a collective costs over a link.

It imports ``_util`` and the C++ extension, and knows nothing of modules and parameters. Start with
``transports.py`` (which transport a group of ranks uses), then ``lanes.py`` (what collectives run
on); ``link.py`` and ``simulated.py`` stand in for ranks that are not there.
"""
