"""PaddleNLP's checkpoints."""
