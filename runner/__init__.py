"""The C++ program that runs an exported model without Python, and what builds it."""
