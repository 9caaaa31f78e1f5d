"""The parts that all benchmarks share: options, ranks, timing, tables, JSON and pictures.

It knows no benchmark, and of fsdp_ext it imports only the helpers that write files and tables.
Start with `runner`: it runs one benchmark from its options to its last table.
"""
