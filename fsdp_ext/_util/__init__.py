"""Small helpers without state: whole files, text tables, tensors in containers.

Nothing here knows of sharding or of collectives, and nothing here imports another package of
fsdp_ext. Start with ``files.py``; each module stands alone.
"""
