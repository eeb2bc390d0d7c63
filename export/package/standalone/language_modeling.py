"""Text generation with onnxruntime, numpy and tokenizers: python infer.py "TEXT", or lines on stdin."""

from __future__ import annotations

from smelt.export.package.standalone.session import run_command_line
from smelt.export.package.standalone.writer import Writer

if __name__ == "__main__":
    run_command_line(Writer, Writer.__call__, __doc__)
