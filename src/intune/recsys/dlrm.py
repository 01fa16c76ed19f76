"""DLRM, the deep learning recommendation model of Naumov et al. (2019, arXiv 1906.00091), in plain PyTorch.

dense [n, 13] --- bottom MLP ------- [n, d] --+-----------------------------+
                                              |                             |
sparse [n, 26] -- one embedding each [n, 26, d] -- dot product of each pair --- [n, d + pairs] -- top MLP -- logit [n]
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class DLRM(nn.Module):
    """Bottom MLP for counts, an embedding for each category, their pairwise dot products, and a top MLP.

    The tables lie one after another in a single `nn.Embedding`, so that one lookup serves all of them. Its gradients
    are sparse: use an optimizer that takes those (SGD, Adagrad). That an index is within its own table is not checked.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        *,
        dense_features: int = 13,
        dim: int = 16,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
    ) -> None:
        """Make a model with fresh weights, drawn from PyTorch's generator.

        Args:
            table_rows: Rows of each embedding table.
            dense_features: Columns of `dense`.
            dim: Width d of embeddings.
            bottom: Widths of the hidden layers of the bottom MLP; its last layer has width d.
            top: Widths of the hidden layers of the top MLP; its last layer has width 1.
        """
        super().__init__()
        self.tables = nn.Embedding(sum(table_rows), dim, sparse=True)
        starts = torch.tensor([0, *table_rows[:-1]]).cumsum(0)
        self.table_starts: Tensor
        self.register_buffer("table_starts", starts)
        with torch.no_grad():
            for table, rows in zip(torch.split(self.tables.weight, list(table_rows)), table_rows, strict=True):
                table.uniform_(-(rows**-0.5), rows**-0.5)

        vectors = 1 + len(table_rows)
        row, column = torch.tril_indices(vectors, vectors, offset=-1)
        pairs = row * vectors + column
        self.pairs: Tensor
        self.register_buffer("pairs", pairs)
        self.bottom = _mlp([dense_features, *bottom, dim], last=nn.ReLU())
        self.top = _mlp([dim + len(pairs), *top, 1], last=nn.Identity())

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Predict.

        Args:
            dense: float32[n, dense_features].
            sparse: int64[n, tables], each column in 0..rows-1 of its table.

        Returns:
            Logits, float32[n]; the probability of a click is their sigmoid.
        """
        x = self.bottom(dense)  # [n, d]
        e = self.tables(sparse + self.table_starts)  # [n, tables, d]
        vectors = torch.cat([x.unsqueeze(1), e], dim=1)  # [n, 1 + tables, d]
        products = vectors @ vectors.transpose(1, 2)  # [n, 1 + tables, 1 + tables]
        lower = products.flatten(1).index_select(1, self.pairs)  # each pair once, no vector with itself
        logits: Tensor = self.top(torch.cat([x, lower], dim=1)).squeeze(1)
        return logits


def _mlp(widths: Sequence[int], last: nn.Module) -> nn.Sequential:
    """Linear layers with ReLU between them, started as the paper's code does: normal weights, normal biases."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=(2 / (inputs + outputs)) ** 0.5)
        nn.init.normal_(linear.bias, std=outputs**-0.5)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)
