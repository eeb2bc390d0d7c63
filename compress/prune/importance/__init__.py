"""How much each head and each neuron matters: a file for each way to score them."""
