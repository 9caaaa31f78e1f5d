"""Helpers that several test files share: ranks, models, comparisons with PyTorch."""
