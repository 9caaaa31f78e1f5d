"""The parameters of units: which are sharded, how, and where their shards and gradients lie."""
