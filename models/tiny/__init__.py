"""The bundled model `tiny`: its weights, its training text and its training program."""
