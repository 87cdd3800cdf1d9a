"""Torch code that trades share: codecs, aggregation, channels and hooks.
Not for deciding when any of it is used."""
