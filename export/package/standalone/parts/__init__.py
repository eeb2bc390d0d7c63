"""What infer.py is put together from: it imports nothing of smelt (`assemble.py` puts these in its place).

Each file is a part or, named after a task, the rest of infer.py for it. What they compute is what smelt
computes; the tests compare them token for token.
"""
