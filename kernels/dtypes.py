"""The numbers by which C++ knows torch's dtypes."""

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum class Dtype` in rows.h
