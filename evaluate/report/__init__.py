"""The report of a run: its schema, and how it is drawn as a page, as markdown and on a terminal."""
