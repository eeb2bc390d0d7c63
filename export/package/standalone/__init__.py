"""The parts of infer.py, which import nothing of smelt (`../standalone_format.py` inlines them).

Each file is a part or, if named after a task, the main file of infer.py for that task. They compute the same
as smelt; the tests compare them token for token.
"""
