"""Floor 3, quantisation: formats of weights and activations, algorithms that choose codes, calibration, file layouts."""
