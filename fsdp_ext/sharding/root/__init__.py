"""A unit and the root of all units of a model, and their work in each step."""
