"""The parts that every room uses: types, seeds, reading and writing files, batches as tensors.

It imports no other room. Only `batch` and `masked` import torch.
"""
