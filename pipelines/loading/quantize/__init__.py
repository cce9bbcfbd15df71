"""The calibrated models of `quant`. `calibrated.py` finds one, `model.py` makes one, layer by layer."""
