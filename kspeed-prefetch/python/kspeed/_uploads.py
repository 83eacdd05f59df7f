import logging
import os

from ._control import ControlError, mount_of, post

log = logging.getLogger("kspeed")


def wait_uploaded(*paths, timeout=None):
    """Returns when what was written at the paths, files or directories, is complete
    in the bucket. Close them first: a file that is open for writing is not uploaded.

    ``timeout``: seconds after which it fails if not one upload has ended; none: it
    fails only when the store refuses. Raises ControlError with the reason; what is
    not uploaded is kept on the cache disk, and tried again. Outside of a KSpeed
    mount it returns at once.
    """
    for path in paths:
        mount = mount_of(path)
        if mount is None:
            log.debug("%s is in no KSpeed mount: nothing to wait for", path)
            continue
        mountpoint, control = mount
        body = {
            "action": "sync",
            "mountpoint": mountpoint,
            "paths": [os.path.relpath(os.path.abspath(os.fspath(path)), mountpoint)],
        }
        if timeout is not None:
            body["patience_ms"] = int(timeout * 1000)
        for line in post(control, "/paths", body):
            if line["kind"] == "failed":
                raise ControlError(f"{path}: {line['error']}")
