import kspeed
import pytest


def test_what_was_written_is_in_the_origin(checkpoints):
    step = checkpoints.path / "step100"
    step.mkdir()
    (step / "model.pt").write_bytes(b"x" * 100_000)
    (checkpoints.path / "other").write_text("not waited for")
    assert not (checkpoints.source / "step100" / "model.pt").exists()
    kspeed.wait_uploaded(step)
    assert (checkpoints.source / "step100" / "model.pt").read_bytes() == b"x" * 100_000
    assert not (checkpoints.source / "other").exists()
    kspeed.wait_uploaded(checkpoints.path)
    assert (checkpoints.source / "other").exists()


def test_what_can_not_be_stored_is_told(checkpoints):
    (checkpoints.path / "f").write_text("x")
    # Somebody else's directory is where the file is to be.
    (checkpoints.source / "f").mkdir()
    with pytest.raises(kspeed.ControlError, match="f: "):
        kspeed.wait_uploaded(checkpoints.path / "f", timeout=3)


def test_outside_of_a_mount_nothing_is_waited_for(tmp_path):
    kspeed.wait_uploaded(tmp_path)
