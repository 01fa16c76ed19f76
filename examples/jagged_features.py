"""Lists of different lengths to embeddings: what a person viewed, hashed, cut to the last 20, pooled.

    python examples/jagged_features.py

A list column comes as (values, offsets): the same two tensors that a jagged tensor is made of, here and elsewhere.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import intune
from intune.recsys import Dense, FeatureSpec, Hash, MultiHot, Number, Sparse

ROWS, ITEMS, TABLE, WIDTH = 20_000, 5_000, 4_096, 16


def write_rows(path: Path) -> None:
    """Made-up sessions; whoever viewed item 7 clicks more often."""
    random = np.random.default_rng(0)
    viewed = [random.zipf(1.5, count) % ITEMS for count in random.integers(0, 30, ROWS)]
    clicked = random.random(ROWS) < np.array([0.6 if 7 in items else 0.2 for items in viewed])
    table = {"hour": random.integers(0, 24, ROWS), "shop": random.integers(0, 99, ROWS), "viewed": viewed}
    pq.write_table(pa.table({**table, "clicked": clicked.astype(np.int8)}), path, row_group_size=4_000)


class Model(torch.nn.Module):
    """An embedding of the shop, a pooled one of what was viewed, and a line through both."""

    def __init__(self) -> None:
        super().__init__()
        self.shop = torch.nn.Embedding(TABLE, WIDTH)
        self.viewed = torch.nn.EmbeddingBag(TABLE, WIDTH, mode="mean", include_last_offset=True)
        self.out = torch.nn.Linear(2 * WIDTH + 1, 1)

    def forward(self, batch: dict) -> torch.Tensor:
        """Logits [n]."""
        values, offsets = batch["viewed"]
        parts = [batch["dense"], self.shop(batch["sparse"][:, 0]), self.viewed(values, offsets)]
        return self.out(torch.cat(parts, dim=1)).squeeze(1)


def main() -> None:
    """Train for three epochs."""
    spec = FeatureSpec(
        dense=[Dense("hour", Number(log=True))],
        sparse=[Sparse("shop", Hash(TABLE))],
        lists=[MultiHot("viewed", Hash(TABLE), most=20, keep="last")],
        label="clicked",
    )
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of = torch.nn.BCEWithLogitsLoss()
    with TemporaryDirectory() as folder:
        write_rows(Path(folder) / "sessions.parquet")
        pipe = intune.read_parquet(folder, columns=spec.columns)
        spec.check(pipe.source.schema)  # a wrong column is known before anything runs
        pipe = pipe.map(spec).shuffle(rows=10_000, seed=1).batch(512).to_torch()
        with pipe.loader(epochs=3) as loader:
            for epoch in range(3):
                total = rows = 0.0
                for batch in loader:
                    loss = loss_of(model(batch), batch["label"])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    total, rows = total + loss.item() * len(batch["label"]), rows + len(batch["label"])
                print(f"epoch {epoch}: {rows:,.0f} rows, mean loss {total / rows:.4f}")


if __name__ == "__main__":
    main()
