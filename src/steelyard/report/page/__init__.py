"""The interactive parts of the HTML page. Not for its text and tables: see ../html.py."""
