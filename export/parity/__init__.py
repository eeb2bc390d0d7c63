"""Does an exported graph compute what its parent computes? Asked on real inputs, answered or raised."""
