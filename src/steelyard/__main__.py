"""`python -m steelyard` is the command `steelyard`."""

from steelyard.cli import command

if __name__ == "__main__":
    command()
