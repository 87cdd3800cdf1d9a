"""What operators, their workspace and links cost on the devices at hand, timed once and cached.
Not for adding costs up: that is predict."""
