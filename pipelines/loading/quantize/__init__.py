"""`task=quantize`, and the calibrated models of `quant`. `quantize.py` finds or makes one, layer by layer."""
