"""Quantisation: formats of weights and activations, algorithms that choose codes, calibration, file layouts."""
