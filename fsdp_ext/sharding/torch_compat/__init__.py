"""Views and hooks for code written for PyTorch's FSDP2: state, hooks, conversions."""
