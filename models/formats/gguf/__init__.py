"""GGUF, llama.cpp's format (docs/gguf.md in ggml): read a file's header, weights and tokenizer, and write such files."""
