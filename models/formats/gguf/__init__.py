"""GGUF, the format of llama.cpp (ggml, docs/gguf.md): reads a file's header, weights and tokenizer, and writes such files."""
