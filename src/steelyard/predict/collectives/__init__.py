"""The seconds of a collective in a group of ranks, by algorithm and topology.

Not for measured links: see measure/links/.
"""
