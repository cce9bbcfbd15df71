"""Floor 3, quantisation schemes and algorithms. `quant=none` is the only one so far."""
