"""OpenAI's batches: the files and jobs behind /v1/batches, and batch lines as input of `task=predict`."""
