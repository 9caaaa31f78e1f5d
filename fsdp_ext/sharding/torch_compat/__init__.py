"""What code written for PyTorch's FSDP2 finds on a sharded module: state, hooks, conversions."""
