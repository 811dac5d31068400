"""The HTTP server: requests of several protocols in, translations of a scheduler's running batch out.

In: open translators by name. Out: an ASGI application. `tformer serve` runs it.
"""
