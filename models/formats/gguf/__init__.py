"""GGUF, the format of llama.cpp: what a file says, its weights and its tokenizer, and writing one (ggml, docs/gguf.md)."""
