"""`python -m smelt` is the command line.

`python -m` puts the current folder first on `sys.path`, where a `json.py` of a downloaded folder would be
imported. It is taken away again before anything else is imported.
"""

import os
import sys

if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from smelt.cli import program

program()
