"""MindSpore's checkpoints."""
