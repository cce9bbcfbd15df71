"""The bundled model `tiny`: its weights, the text that it learned from, and its training."""
