"""A unit and the root of all units of a model, and what they do at each step."""
