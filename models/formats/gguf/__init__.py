"""GGUF, llama.cpp's format (ggml's docs/gguf.md): read a file's header, weights and tokenizer, and write such files."""
