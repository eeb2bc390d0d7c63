"""How many bits each layer gets, by what few bits of it do to the model's outputs."""
