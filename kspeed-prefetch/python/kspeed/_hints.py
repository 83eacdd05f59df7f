"""Hints and warming."""

import logging
import os

from ._control import ControlError, mount_of, post

log = logging.getLogger("kspeed")


def hint(files, order=None, *, sampler=None, seed=None, epoch=0, name=None):
    """Tells the order in which files will be read.

    ``files``: paths in one KSpeed mount; what the order numbers.
    ``order``: numbers of files, in the order of reading. Or ``sampler``: an
    iterable of such numbers that iterating does not change (``DistributedSampler``
    and any sampler with a generator of its own seeded before each epoch; not a
    ``RandomSampler`` without one, which draws from the global generator). Or
    ``seed`` and ``epoch``: ``torch.randperm(len(files))`` seeded with their sum,
    which KSpeed then follows through the later epochs by itself, for all ranks.
    None of these: the files as they are listed.
    ``name``: an order replaces the one told before under this name; by default
    one for each process.

    Returns how many of the files the mount knows: 0 outside of a KSpeed mount, and
    when the daemon does not answer.
    """
    if sum(x is not None for x in (order, sampler, seed)) > 1:
        raise ValueError("give one of order, sampler and seed")
    files = [os.fspath(f) for f in files]
    if not files:
        return 0
    mount = mount_of(os.path.dirname(os.path.abspath(files[0])))
    if mount is None:
        log.debug("%s is in no KSpeed mount: no hint is given", files[0])
        return 0
    mountpoint, control = mount
    if seed is not None:
        told = {"seed": {"seed": int(seed), "epoch": int(epoch)}}
    else:
        numbers = order if order is not None else sampler
        told = {"order": [] if numbers is None else [int(i) for i in numbers]}
    below = mountpoint.rstrip("/") + "/"
    relative = []
    for f in files:
        f = os.path.abspath(f)
        # Kept in its place, so that numbers stay right; no such file is known.
        relative.append(f[len(below) :] if f.startswith(below) else "")
    body = {
        "mountpoint": mountpoint,
        "id": name or f"{os.uname().nodename}-{os.getpid()}",
        "files": relative,
        "told": told,
    }
    try:
        return post(control, "/hint", body)[0]["known"]
    except ControlError as e:
        log.debug("no hint is given: %s", e)
        return 0


def warm(*paths, pin=False):
    """Brings files, or all files below directories, into the cache, and waits.

    ``pin``: and spares them from eviction. Returns ``(files, bytes)`` that are
    there; ``(0, 0)`` outside of a KSpeed mount. Raises ControlError naming the
    first file that failed.
    """
    done_files, done_bytes = 0, 0
    for path in paths:
        mount = mount_of(path)
        if mount is None:
            log.debug("%s is in no KSpeed mount: nothing is warmed", path)
            continue
        mountpoint, control = mount
        body = {
            "action": "warm-and-pin" if pin else "warm",
            "mountpoint": mountpoint,
            "paths": [os.path.relpath(os.path.abspath(os.fspath(path)), mountpoint)],
        }
        for line in post(control, "/paths", body):
            if line["kind"] == "failed":
                raise ControlError(f"{line['path']}: {line['error']}")
            if line["kind"] == "done":
                done_files += line["files"]
                done_bytes += line["bytes"]
    return done_files, done_bytes
