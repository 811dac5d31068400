"""Modules of the user's own: how they are described, called, cached and read from a Python file."""
