import os
import random

import kspeed
import pytest


def files(mount):
    train = mount.path / "train"
    return sorted(str(p) for p in train.glob("*/*.jpg"))


def test_the_mount_of_a_path(mount, tmp_path):
    mountpoint, control = kspeed.mount_of(mount.path / "train" / "cats")
    assert mountpoint == str(mount.path)
    assert os.path.exists(control)
    assert kspeed.mount_of(tmp_path) is None


def test_a_told_order_is_fetched_before_it_is_read(mount):
    order = list(range(400))
    random.Random(5).shuffle(order)
    assert kspeed.hint(files(mount), order) == 400
    mount.wait_for("all fetched", lambda s: s["predicted_fetches"] >= 400)
    for i in order:
        assert len(open(files(mount)[i], "rb").read()) == 4096
    s = mount.status()
    assert "told" in s["datasets"][0]["predictor"]
    assert s["predicted_ready"] == s["predicted_reads"]


def test_a_sampler_and_a_seed(mount):
    assert kspeed.hint(files(mount), sampler=iter(range(10, 20))) == 400
    mount.wait_for("ten fetched", lambda s: s["predicted_fetches"] == 10)
    assert kspeed.hint(files(mount), seed=42, epoch=3, name="job") == 400
    mount.wait_for("all fetched", lambda s: s["predicted_fetches"] >= 400)
    told = [d["predictor"] for d in mount.status()["datasets"]]
    assert any("seed 42 + epoch, epoch 3" in p for p in told), told


def test_files_that_do_not_exist_keep_their_numbers(mount):
    some = files(mount)[:3] + [str(mount.path / "train" / "gone.jpg"), "/elsewhere"]
    assert kspeed.hint(some, [4, 3, 2, 1, 0]) == 3
    mount.wait_for("three fetched", lambda s: s["predicted_fetches"] == 3)


def test_nothing_breaks_outside_of_a_mount(tmp_path):
    (tmp_path / "f").write_text("x")
    assert kspeed.hint([tmp_path / "f"]) == 0
    assert kspeed.hint([]) == 0
    assert kspeed.warm(tmp_path) == (0, 0)


def test_wrong_use_is_told(mount):
    with pytest.raises(ValueError, match="one of"):
        kspeed.hint(files(mount), [1], seed=1)


def test_a_directory_is_warmed(mount):
    assert kspeed.warm(mount.path / "train" / "cats") == (200, 200 * 4096)
    with pytest.raises(kspeed.ControlError, match="gone"):
        kspeed.warm(mount.path / "train" / "gone")


def test_torchs_sampler_tells_its_order(mount):
    pytest.importorskip("torch", reason="torch is not installed")
    from kspeed.torch import DistributedSampler

    class Dataset:
        samples = [(f, 0) for f in files(mount)]

        def __len__(self):
            return len(self.samples)

    sampler = DistributedSampler(Dataset(), num_replicas=2, rank=1, seed=7)
    order = list(sampler)
    assert len(order) == 200
    mount.wait_for("a share fetched", lambda s: s["predicted_fetches"] == 200)
