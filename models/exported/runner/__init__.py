"""The C++ program that runs an exported model without Python, and its build script."""
