"""Small helpers without state: files, text tables, checks of numbers, tensors in containers.

They may not import any other package of fsdp_ext. Start reading anywhere: each module stands alone.
"""
