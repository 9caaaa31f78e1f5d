"""The subjects of the benchmarks: models, and the systems that shard them.

It may import fsdp_ext and `bench.harness`, but no benchmark.
Start with `training`: the transformer that `step` and `memory` train, and each system's settings.
"""
