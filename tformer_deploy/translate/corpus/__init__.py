"""A corpus of any size, translated in shards: on this machine, or on many with Ray."""
