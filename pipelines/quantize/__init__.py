"""`task=quantize`, and the models that `quant` needs calibrated: `quantize.py` finds or makes one, layer by layer, with a report."""
