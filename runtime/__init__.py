"""Running a model: loading, the runners, the one generation loop, the layers that know how to leave torch."""
