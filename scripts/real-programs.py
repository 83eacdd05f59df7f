"""What people run in a directory, each with a check of what it wrote.

Run as: real-programs.py DIR, which is made and left empty. Exits with 1 if one fails.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time

import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from safetensors.numpy import load_file, save_file


def memmap():
    a = np.memmap("mm.bin", dtype=np.float32, mode="w+", shape=(1000, 1000))
    a[:] = 3
    a[5, 5] = 7
    a.flush()
    del a
    b = np.memmap("mm.bin", dtype=np.float32, mode="r+", shape=(1000, 1000))
    assert b[5, 5] == 7
    b[6, 6] = 8
    del b
    assert np.fromfile("mm.bin", dtype=np.float32).reshape(1000, 1000)[6, 6] == 8


def torch_save():
    """torch.save's way: the file, written by pieces, then a rename over the last."""
    for i in range(3):
        with open("ckpt.pt.tmp", "wb") as f:
            for _ in range(40):
                f.write(bytes([i]) * (1 << 20))
            f.flush()
            os.fsync(f.fileno())
        os.chmod("ckpt.pt.tmp", 0o640)
        os.replace("ckpt.pt.tmp", "ckpt.pt")
    with open("ckpt.pt", "rb") as f:
        assert f.read() == bytes([2]) * (40 << 20)
    assert os.stat("ckpt.pt").st_mode & 0o777 == 0o640


def safetensors():
    save_file({"w": np.ones((1000, 1000), np.float32)}, "m.safetensors")
    assert load_file("m.safetensors")["w"].sum() == 1e6


def hdf5():
    with h5py.File("a.h5", "w") as f:
        f["x"] = np.arange(100_000)
    with h5py.File("a.h5", "a") as f:
        f["y"] = np.arange(10)
    with h5py.File("a.h5") as f:
        assert f["x"][99_999] == 99_999 and f["y"][9] == 9


def zarr_chunks():
    z = zarr.open("z.zarr", mode="w", shape=(1000, 1000), chunks=(100, 100), dtype="f4")
    z[:] = 5
    assert zarr.open("z.zarr", mode="r")[999, 999] == 5


def parquet():
    pq.write_table(pa.table({"a": list(range(100_000))}), "t.parquet")
    assert pq.read_table("t.parquet").num_rows == 100_000


def lmdb_maps():
    for writemap in (False, True):
        path = f"lmdb{writemap}"
        e = lmdb.open(path, map_size=10 << 20, writemap=writemap)
        for i in range(50):
            with e.begin(write=True) as t:
                t.put(str(i).encode(), b"v" * 1000)
        e.close()
        e = lmdb.open(path, map_size=10 << 20)
        with e.begin() as t:
            assert t.stat()["entries"] == 50
        e.close()


def sqlite():
    for mode in ("delete", "wal"):
        c = sqlite3.connect(f"db_{mode}")
        assert c.execute(f"pragma journal_mode={mode}").fetchone()[0] == mode
        c.execute("create table t(a)")
        for i in range(30):
            c.execute("insert into t values(?)", (i,))
            c.commit()
        c.close()
        c = sqlite3.connect(f"db_{mode}")
        assert c.execute("select count(*) from t").fetchone()[0] == 30
        assert c.execute("pragma integrity_check").fetchone()[0] == "ok"
        c.close()


def shell(script):
    def run():
        r = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=False)
        assert r.returncode == 0, r.stdout[-300:] + r.stderr[-600:]

    return run


GIT = "git -c user.email=a@b -c user.name=x -c init.defaultBranch=main"


def programs(source):
    return {
        "numpy.memmap": memmap,
        "torch.save": torch_save,
        "safetensors": safetensors,
        "HDF5": hdf5,
        "zarr": zarr_chunks,
        "Parquet": parquet,
        "LMDB": lmdb_maps,
        "SQLite, both journal modes": sqlite,
        "git clone, commit, gc": shell(
            f"git clone -q {source} g; cd g; echo x >> f1; {GIT} commit -qam 2; git gc -q; "
            "git fsck --strict; test -z \"$(git status --porcelain)\""
        ),
        "tar, tar -d": shell(
            f"tar cf t.tar -C {source} .; mkdir x; tar xf t.tar -C x; tar df t.tar -C x"
        ),
        "rsync": shell(
            f"rsync -a {source}/ r/; test -z \"$(rsync -an --itemize-changes {source}/ r/)\""
        ),
        "pip install": shell(
            f"{sys.executable} -m pip install -q --no-deps --target p six idna; "
            f"PYTHONPATH=p {sys.executable} -c 'import six, idna'"
        ),
        "cp -a, diff -r": shell(f"cp -a {source} c; diff -r {source} c"),
        "editors' saves": shell(
            "printf 'a\\nb\\n' > e; sed -i s/a/c/ e; perl -pi -e 's/b/d/' e; "
            "test \"$(cat e)\" = \"$(printf 'c\\nd')\""
        ),
        "flock": shell("flock l true"),
        "sparse files, fallocate": shell(
            "dd if=/dev/zero of=s bs=1 count=1 seek=10M status=none; "
            "test $(stat -c %s s) = 10485761; fallocate -l 1M a; fallocate -p -o 0 -l 4096 a"
        ),
        "rm -rf": shell("rm -rf g x r p c z.zarr"),
    }


def main():
    source = tempfile.mkdtemp()
    shell(
        f"cd {source}; {GIT} init -q; for i in $(seq 200); do echo $i > f$i; done; "
        f"git add .; {GIT} commit -qm 1"
    )()
    os.makedirs(sys.argv[1])
    os.chdir(sys.argv[1])
    failed = 0
    for name, run in programs(source).items():
        began = time.monotonic()
        try:
            run()
            print(f"ok    {name} ({time.monotonic() - began:.2f} s)", flush=True)
        except Exception as e:
            failed += 1
            print(f"FAIL  {name}: {e!r}", flush=True)
    os.chdir("/")
    shutil.rmtree(source)
    shutil.rmtree(sys.argv[1])
    return min(failed, 1)


sys.exit(main())
