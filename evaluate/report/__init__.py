"""The report of a run: its schema, and its rendering as HTML, Markdown and terminal text."""
