"""Seconds of a collective among a group of ranks, by algorithm and topology.

Not for measured links: see measure/links/.
"""
