"""A real mount of a directory, by the `kspeed` that was built."""

import json
import os
import pathlib
import shutil
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).parents[3]


def program():
    path = os.environ.get("KSPEED_BIN") or ROOT / "target" / "debug" / "kspeed"
    if not pathlib.Path(path).exists():
        pytest.fail(f"{path} is missing: cargo build, or set KSPEED_BIN")
    return str(path)


class Mount:
    def __init__(self, path):
        self.path = path

    def status(self):
        return json.loads((self.path / ".kspeed" / "status").read_text())["mounts"][0]

    def wait_for(self, what, of):
        end = time.monotonic() + 20
        while not of(self.status()):
            assert time.monotonic() < end, f"{what}: not within 20 s: {self.status()}"
            time.sleep(0.05)


def serve(tmp_path, source, *options):
    """A mount of a directory for the length of a test."""
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    p = subprocess.Popen(
        [program(), "mount", str(source), str(mnt), "--foreground", *options,
         "--cache-dir", str(tmp_path / "cache"), "--min-free", "0"],
        stderr=(tmp_path / "log").open("w"),
    )
    end = time.monotonic() + 20
    while True:
        try:
            if json.loads((mnt / ".kspeed" / "status").read_text())["mounts"]:
                break
        except OSError:
            pass
        assert p.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.02)
    yield Mount(mnt)
    subprocess.run(["umount", "-l", str(mnt)], check=False)
    p.wait(30)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


@pytest.fixture
def mount(tmp_path):
    """400 files of 4 KiB in two classes, mounted read-only."""
    source = tmp_path / "source"
    for c in ("cats", "dogs"):
        (source / "train" / c).mkdir(parents=True)
        for i in range(200):
            (source / "train" / c / f"{i:04}.jpg").write_bytes(bytes([i]) * 4096)
    yield from serve(tmp_path, source, "--read-only")


@pytest.fixture
def checkpoints(tmp_path):
    """An empty directory, mounted to be written to, that uploads late."""
    source = tmp_path / "source"
    source.mkdir()
    for m in serve(tmp_path, source, "--upload-delay", "1h"):
        m.source = source
        yield m
