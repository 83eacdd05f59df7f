#!/usr/bin/env python3
"""Real PyTorch DataLoaders over a mount of a store that is 20 ms away.

    cargo build --release --workspace --bins
    pip install torch && scripts/real-pytorch.py

Prints, for each run, the time of two epochs with and without prediction, what
`kspeed status` says, and which part of the reads did not wait for the store. The
trainer computes 2 ms a sample.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BIN = pathlib.Path(__file__).parents[1] / "target" / "release"
CLASSES, PER_CLASS, BYTES = 20, 100, 110_000
COMPUTE_S = 0.002
BATCH = 32
ENV = dict(os.environ, AWS_ACCESS_KEY_ID="kspeed", AWS_SECRET_ACCESS_KEY="kspeed-secret",
           AWS_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true")


class Folder(Dataset):
    """Indexes as torchvision's ImageFolder; reads the bytes, decodes nothing."""

    def __init__(self, root):
        self.samples = []
        for c in sorted(e.name for e in os.scandir(root) if e.is_dir()):
            for at, _, names in sorted(os.walk(os.path.join(root, c))):
                self.samples += [(os.path.join(at, n), c) for n in sorted(names)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        with open(self.samples[i][0], "rb") as f:
            return len(f.read())


def train(loader, epochs, sampler=None):
    times = []
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        began = time.monotonic()
        due = began
        for batch in loader:
            due = max(due, time.monotonic()) + COMPUTE_S * len(batch)
            time.sleep(max(0.0, due - time.monotonic()))
        times.append(time.monotonic() - began)
    return times


def rank(r, root, out):
    dataset = Folder(root)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=r, shuffle=True)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=2, sampler=sampler)
    out.put(train(loader, 2, sampler))


def shuffled(workers, seed):
    def run(root):
        torch.manual_seed(seed)
        return train(DataLoader(Folder(root), batch_size=BATCH, num_workers=workers, shuffle=True), 2)
    return run


def generator(workers, seed):
    def run(root):
        g = torch.Generator()
        g.manual_seed(seed)
        loader = DataLoader(Folder(root), batch_size=BATCH, num_workers=workers, shuffle=True, generator=g)
        return train(loader, 2)
    return run


def distributed(root):
    context = mp.get_context("spawn")
    out = context.Queue()
    ranks = [context.Process(target=rank, args=(r, root, out)) for r in range(2)]
    for p in ranks:
        p.start()
    times = [out.get() for _ in ranks]
    for p in ranks:
        p.join()
    return [max(t) for t in zip(*times)]


RUNS = [
    ("DataLoader(shuffle=True), 0 workers, manual_seed(0)", shuffled(0, 0), 1),
    ("DataLoader(shuffle=True), 2 workers, manual_seed(42)", shuffled(2, 42), 1),
    ("DataLoader(shuffle=True), 4 workers, manual_seed(1234)", shuffled(4, 1234), 1),
    ("DataLoader(shuffle=True, generator=g), 4 workers, seed 0", generator(4, 0), 1),
    ("DistributedSampler, 2 ranks of 2 workers, seed 0", distributed, 2),
]


def main():
    work = pathlib.Path(tempfile.mkdtemp(dir="/var/tmp", prefix="kspeed-torch-"))
    for c in range(CLASSES):
        d = work / "s3" / "data" / "train" / f"class{c:02}"
        d.mkdir(parents=True)
        for i in range(PER_CLASS):
            (d / f"{i:05}.jpg").write_bytes(os.urandom(BYTES))
    server = subprocess.Popen(
        [BIN / "kspeed-s3d", work / "s3", "--listen", "127.0.0.1:0", "--bucket", "data", "--latency",
         "20ms", "--connection-rate", "100000000", "--total-rate", "800000000"],
        stdout=subprocess.PIPE, text=True)
    ENV["KSPEED_ENDPOINT_URL"] = server.stdout.readline().strip()
    print(f"torch {torch.__version__}, python {sys.version.split()[0]}; {CLASSES * PER_CLASS} files of "
          f"{BYTES} bytes, batches of {BATCH}, {COMPUTE_S * 1000:.0f} ms of compute a sample")
    mnt = work / "mnt"
    mnt.mkdir()
    try:
        for name, run, ranks in RUNS:
            print(f"\n{name} (compute alone: {CLASSES * PER_CLASS * COMPUTE_S / ranks:.1f} s an epoch)")
            for predict in ["auto", "off"]:
                mount = subprocess.Popen(
                    [BIN / "kspeed", "mount", "s3://data", mnt, "--foreground", "--read-only", "--log",
                     "warn", "--predict", predict, "--cache-dir", work / "cache"], env=ENV)
                status = mnt / ".kspeed" / "status"
                while not status.exists() or not json.loads(status.read_text())["mounts"]:
                    time.sleep(0.05)
                times = ", ".join(f"{t:.1f} s" for t in run(str(mnt / "train")))
                s = json.loads(status.read_text())["mounts"][0]
                line = f"  --predict {predict:<5} epochs took {times}"
                for d in s["datasets"]:
                    line += (f"\n      {d['predictor']}; ranks {d['ranks_here']} of {d['world']}; "
                             f"{d['hit_rate'] * 100:.1f} % of {d['reads']} reads did not wait")
                print(line, flush=True)
                subprocess.run(["umount", "-l", mnt], check=True)
                mount.wait()
                shutil.rmtree(work / "cache")
    finally:
        server.kill()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
