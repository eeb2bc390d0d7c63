"""The sparsity methods: a file each; `registry.py` lists them."""
