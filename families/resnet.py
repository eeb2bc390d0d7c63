"""ResNet, a network of convolutions. Source: transformers' modeling_resnet.py.

It has no blocks of attention and feed-forward parts: what is cut along those refuses it.
"""

from __future__ import annotations

from smelt.families.family import Config, Family, Positions, Rate


def refuses(config: Config) -> list[str]:
    """Return what of a config smelt cannot follow."""
    if config.get("num_channels", 3) != 3:
        return [f"num_channels is {config['num_channels']}; images are read as RGB, which has 3."]
    return []


FAMILY = Family(
    name="resnet",
    kind="encoder",
    tasks=("image-classification",),
    stacks=lambda config: (),
    embedding=(),
    width="hidden_sizes",
    rate=Rate(5e-4, None),  # as benchmarks/recipes/resnet-cifar10.yaml
    head=("classifier.1",),
    reads="images",
    normed=("convolution", "normalization"),
    chain="layer",  # of a basic or a bottleneck block
    beside="shortcut",
    positions=Positions(None),
    refuses=refuses,
)
