"""The training that techniques share: settings, batches, the loop, what is kept."""
