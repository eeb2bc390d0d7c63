"""Running models: loading, the runners, the generation loop, the layers that stages insert."""
