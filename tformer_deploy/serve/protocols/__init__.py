"""Protocols that clients speak, each a module with `routes(models)`."""
