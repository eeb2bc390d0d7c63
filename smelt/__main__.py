"""Run the command line with `python -m smelt`.

`python -m` puts the current folder first on `sys.path`, so that a `json.py` of a downloaded folder would be
imported. The entry is removed before any other import.
"""

import os
import sys

if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from smelt.cli.main import program

program()
