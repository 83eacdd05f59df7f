"""Orders made by the real libraries, against which tests hold ours.

    pip install torch numpy && python make.py > orders.json

Long orders are stored as their first 16 items and the CRC-32 of all items as
little-endian u32.
"""

import json
import random
import struct
import sys
import zlib

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Range(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return i


def order(items):
    items = [int(i) for i in items]
    crc = zlib.crc32(struct.pack(f"<{len(items)}I", *items))
    return {"len": len(items), "head": items[:16], "crc": crc}


def main():
    sizes = [1, 2, 5, 100, 1000, 20_000, 65_537, 1_281_167]
    seeds = [0, 1, 42, 1234, 0x9E3779B9, 0xFFFFFFFF]
    out = {"made_by": f"torch {torch.__version__}, numpy {np.__version__}, python {sys.version.split()[0]}"}

    rows = out["torch_randperm"] = []
    for n in sizes:
        for seed in seeds:
            g = torch.Generator()
            g.manual_seed(seed)
            rows.append({"n": n, "seed": seed, "order": order(torch.randperm(n, generator=g).tolist())})

    # Two epochs in a row, workers or not: the draws are the same.
    rows = out["dataloader_shuffle"] = []
    for n in [100, 20_000]:
        for seed in seeds[:4]:
            torch.manual_seed(seed)
            loader = DataLoader(Range(n), batch_size=None, shuffle=True)
            for epoch in range(3):
                rows.append({"n": n, "seed": seed, "epoch": epoch, "order": order(list(loader))})

    # The generator given, as PyTorch's notes on reproducibility advise.
    rows = out["dataloader_generator"] = []
    for n in [100, 20_000]:
        for seed in seeds[:4]:
            g = torch.Generator()
            g.manual_seed(seed)
            loader = DataLoader(Range(n), batch_size=None, shuffle=True, generator=g)
            for epoch in range(3):
                rows.append({"n": n, "seed": seed, "epoch": epoch, "order": order(list(loader))})

    rows = out["distributed_sampler"] = []
    for n in [10, 1000, 20_000]:
        for world in [1, 2, 3, 8]:
            for drop_last in [False, True]:
                for epoch in [0, 3]:
                    for rank in {0, world - 1}:
                        s = DistributedSampler(Range(n), world, rank, shuffle=True, seed=7, drop_last=drop_last)
                        s.set_epoch(epoch)
                        rows.append({"n": n, "world": world, "rank": rank, "drop_last": drop_last,
                                     "seed": 7, "epoch": epoch, "order": order(list(s))})

    for name, permutation in [
        ("numpy_legacy", lambda n, s: np.random.RandomState(s).permutation(n)),
        ("numpy_generator", lambda n, s: np.random.default_rng(s).permutation(n)),
        ("python_random", lambda n, s: shuffled(n, s)),
    ]:
        rows = out[name] = []
        for n in sizes:
            for seed in seeds:
                rows.append({"n": n, "seed": seed, "order": order(permutation(n, seed))})

    json.dump(out, sys.stdout, indent=None, separators=(",", ":"))


def shuffled(n, seed):
    items = list(range(n))
    random.Random(seed).shuffle(items)
    return items


main()
