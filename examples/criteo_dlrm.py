"""Train a DLRM on Criteo files, with the whole loop in plain sight.

    intune generate clicks.parquet --rows 200000
    python examples/criteo_dlrm.py clicks.parquet

Stop it whenever you like: started again, it goes on where it was.
"""

import argparse
from pathlib import Path

import torch

import intune
from intune.recsys.checkpoint import load_checkpoint, save_checkpoint
from intune.recsys.criteo import read_criteo
from intune.recsys.dlrm import DLRM
from intune.recsys.transforms import CriteoTransform

BATCH = 4096
STEPS_BETWEEN_CHECKPOINTS = 200


def make_pipeline(paths: list[str], transform: CriteoTransform) -> intune.Pipeline:
    """Rows of Criteo files as dicts of tensors: label [n], dense [n, 13], sparse [n, 26]."""
    return read_criteo(paths).map(transform).shuffle(rows=200_000, seed=7).batch(BATCH).to_torch()


def train(paths: list[str], epochs: int, checkpoint: Path) -> float:
    """Train, from the checkpoint on if there is one; the mean loss of the last epoch."""
    transform = CriteoTransform(rows_per_table=100_000)
    torch.manual_seed(7)
    model = DLRM(transform.table_rows)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    loss_of = torch.nn.BCEWithLogitsLoss()
    torch.sparse.check_sparse_tensor_invariants.disable()  # PyTorch warns where neither yes nor no was said
    mean = float("nan")
    with make_pipeline(paths, transform).loader(epochs=epochs) as loader:
        first = 0
        if checkpoint.exists():
            state = load_checkpoint(checkpoint, model, optimizer)["loader"]
            first = state["epoch"]
            if first < epochs:
                loader.load_state_dict(state)
        for epoch in range(first, epochs):
            total, rows = 0.0, 0
            for step, batch in enumerate(loader, 1):
                loss = loss_of(model(batch["dense"], batch["sparse"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total, rows = total + loss.item() * len(batch["label"]), rows + len(batch["label"])
                if step % STEPS_BETWEEN_CHECKPOINTS == 0:
                    save_checkpoint(checkpoint, model, optimizer, {"loader": loader.state_dict()})
            mean = total / rows
            save_checkpoint(checkpoint, model, optimizer, {"loader": loader.state_dict()})
            print(f"epoch {epoch}: {rows:,} rows, mean loss {mean:.4f}")
        print(loader.explain())
    return mean


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("paths", nargs="+", help="Criteo files, folders or patterns")
    arguments.add_argument("--epochs", type=int, default=1)
    arguments.add_argument("--checkpoint", type=Path, default=Path("criteo_dlrm.npz"))
    given = arguments.parse_args()
    train(given.paths, given.epochs, given.checkpoint)
