"""The faults of `python -m bench faults`, each a function that runs on two ranks.

Start with `case`: it has the parts that all faults share. `wrong_numbers`, `breaks` and `peers`
have the faults, and `launch` runs one of them in processes of its own.
"""
