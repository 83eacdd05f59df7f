"""Tells a KSpeed mount what will be read next, so that it is there before, and waits
for what was written.

Nothing here is needed to read files: KSpeed finds most orders by itself. And
nothing here breaks a program: where a path is in no KSpeed mount, or the daemon
does not answer, the functions do nothing and say so at level DEBUG of the logger
``kspeed``.

    import kspeed, kspeed.torch

    kspeed.hint(files, order)                     # any order
    kspeed.hint(files, sampler=sampler)           # that of a sampler
    kspeed.hint(files, seed=0, epoch=epoch)       # torch.randperm, seed + epoch
    kspeed.warm("/mnt/data/train")                # all of a directory, now

    kspeed.wait_uploaded("/mnt/ckpt/step100")     # it is in the bucket

    sampler = kspeed.torch.DistributedSampler(dataset, seed=0)   # drop-in
"""

from ._control import ControlError, mount_of
from ._hints import hint, warm
from ._uploads import wait_uploaded

__all__ = ["ControlError", "hint", "mount_of", "wait_uploaded", "warm"]
__version__ = "0.1.0"
