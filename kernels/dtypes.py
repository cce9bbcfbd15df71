"""The numbers of torch's dtypes in C++."""

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum class Dtype` in rows.h
