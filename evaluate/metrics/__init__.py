"""The metrics: a file each, or one for several that share their formula; `registry.py` lists them."""
