"""The parameters of units: which are sharded, how, and the places of their shards and gradients."""
