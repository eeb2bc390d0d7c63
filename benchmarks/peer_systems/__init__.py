"""The systems that peers.py sets beside smelt: environments, workers, the table of their times."""
