"""Click-through data and models: Criteo files, their transforms, a generator, DLRM and a training loop.

`criteo`, `transforms`, `generate` and `metrics` need the core only; `dlrm` and `train` need PyTorch
(`pip install "intune[torch]"`).
"""
