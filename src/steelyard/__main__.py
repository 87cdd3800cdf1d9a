"""Run the command `steelyard` as `python -m steelyard`."""

from steelyard.cli import command

if __name__ == "__main__":
    command()
