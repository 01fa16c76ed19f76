"""Small networks while they are trained, as `intune.tuners._weights` runs them afterwards; needs torch."""

import itertools
from collections.abc import Sequence

from torch import nn

from intune.tuners.view import Floats


def rectified(sizes: Sequence[int]) -> nn.Sequential:
    """A new network with rectified units between its layers.

    Args:
        sizes: Inputs, sizes of the layers between, outputs.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def layers_of(network: nn.Sequential) -> list[tuple[Floats, Floats]]:
    """Matrix [inputs, outputs] and bias of each layer, for `intune.tuners._weights.write`."""
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    return [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in linear]
