"""A model as a graph in a folder: traced from its own forward, and computed without its code."""
