"""The parts of the onnx stage: its settings, what it asks before work, the files it writes."""
