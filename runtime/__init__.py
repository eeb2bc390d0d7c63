"""Running a model: loading it, the runners, the one generation loop, the layers that know how to leave torch."""
