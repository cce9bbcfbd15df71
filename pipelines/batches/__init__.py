"""OpenAI's batches: their files and jobs behind /v1/batches, and their lines in `task=predict`."""
