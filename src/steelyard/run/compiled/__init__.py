"""The Inductor runner: a program that is cut into segments, lowered and compiled.

Not for the Python runner: see run/codegen.py.
"""
