"""The stage `quantize`: methods, calibration and training of quantized weights."""
