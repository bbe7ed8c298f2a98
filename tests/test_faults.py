"""What can go wrong around a run: kills, full disks, damaged files, other processes, numbers that are not finite."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import time

import numpy as np
import pytest
import torch

import common
import ppo
from tests.helpers import (
    ROOT,
    TINY,
    assert_nothing_lives,
    command,
    contents,
    interrupted,
    refused,
    script,
    stop_midway,
    train,
)  # fmt: skip

SHORT = ["--total-timesteps", 1024, "--eval-every", 512]


@pytest.mark.slow
def test_killed_twenty_times_it_ends_in_the_same_bits(tmp_path):
    """SIGKILL at random moments, from the imports to the last evaluations, checkpoints in being written among them."""
    argv = [*TINY, "--total-timesteps", 100_000, "--eval-every", 20_000, "--runs-dir", tmp_path]
    script(*argv, "--run-name", "whole", check=True)
    rng, kills = random.Random(1), 0
    while kills < 20:
        process = subprocess.Popen(
            command(*argv, "--run-name", "killed"), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(timeout=rng.uniform(1, 3))
            break  # it has finished
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        assert_nothing_lives(process.pid)
    script(*argv, "--run-name", "killed", check=True)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole") and kills == 20
    assert not list((tmp_path / "killed").rglob("*.tmp")) + list((tmp_path / "killed").glob("checkpoint*"))


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_it_goes_on_once_there_is_room(tmp_path, small_disk):
    def fill_up(_):
        with open(small_disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    process = stop_midway(small_disk, "r", fill_up, "--eval-every", 512, "--total-timesteps", 20_000)
    assert process.returncode == 1 and "Traceback" not in process.err
    assert re.search(r"ppo.py: stopped: .*No space left on device", process.err.splitlines()[-1])
    assert_nothing_lives(process.pid)
    (small_disk / "filler").unlink()
    argv = ["--eval-every", 512, "--total-timesteps", 20_000]
    assert contents(train(small_disk, "r", *argv)) == contents(train(tmp_path, "whole", *argv))


def test_a_read_only_disk_is_one_line(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    result = script(*TINY, "--runs-dir", small_disk)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert "cannot write the run folder" in result.stderr and "Read-only" in result.stderr


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "missing"])
def test_a_damaged_checkpoint_is_answered_by_the_one_before(tmp_path, monkeypatch, capsys, damage):
    whole = train(tmp_path, "whole", *SHORT)
    interrupted(monkeypatch, 3, tmp_path, "r", *SHORT)
    latest, previous = (tmp_path / "r" / name for name in common.CHECKPOINTS)
    data = latest.read_bytes()
    if damage == "missing":
        latest.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        latest.write_bytes({"truncate": data[:middle], "flip": flipped, "empty": b""}[damage])
    (tmp_path / "r" / "metrics.csv").write_bytes(b"\xff\x00 garbage")  # a checkpoint has its text
    assert contents(train(tmp_path, "r", *SHORT)) == contents(whole)
    said = capsys.readouterr().err
    assert damage == "missing" or (f"{latest} cannot be read" in said and previous.name in said)


@pytest.mark.parametrize("name", [*common.CHECKPOINTS, "config.json", "result.json"])
def test_what_cannot_be_replaced_is_named(tmp_path, monkeypatch, capsys, name):
    interrupted(monkeypatch, 3, tmp_path, "r", *SHORT)
    for file in common.CHECKPOINTS if name.startswith("checkpoint") else [name]:
        (tmp_path / "r" / file).write_bytes(b"[1, 2")
    argv = [*map(str, [*TINY, *SHORT, "--runs-dir", tmp_path, "--run-name", "r"])]
    capsys.readouterr()
    assert ppo.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "r" / name) in line
    assert ppo.main([*argv, "--overwrite"]) == 0


def test_two_processes_in_one_folder(tmp_path):
    second = []

    def start_another(process):
        argv = [*TINY, "--total-timesteps", 10**6, "--runs-dir", tmp_path, "--run-name", "r"]
        same = script(*argv)
        second.extend([(same.returncode, same.stderr.splitlines()), refused(*argv, "--overwrite")])
        process.terminate()

    first = stop_midway(tmp_path, "r", start_another)
    assert first.returncode == 143
    for code, (line,) in second:
        assert code == 2 and line.endswith("r is in use by another process")


def test_a_clock_that_jumps(tmp_path, monkeypatch):
    whole = train(tmp_path, "whole", *SHORT)
    jumps = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: jumps.uniform(-1e9, 4e9))
    jumped = train(tmp_path, "jumped", *SHORT)
    assert contents(jumped) == contents(whole)
    assert all(float(row["steps_per_s"]) > 0 for row in common.read_csv(jumped / "metrics.csv"))


@pytest.mark.slow
def test_an_environment_that_takes_its_process_along(tmp_path):
    result = script(*TINY, "--env-id", "tests.envs:HangsUp-v0", "--runs-dir", tmp_path, "--workers", 1)
    assert result.returncode == 1 and "worker 0 (environments 0 to 3) died, exit code 3" in result.stderr
    assert "Traceback" not in result.stderr


def test_silence_is_said_and_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(common, "SILENCE_S", 0.05)
    with common.Workers(1, common.policy_config("CartPole-v1"), 0, 2) as workers:
        workers.start(nap)
        assert workers.results() == ["awake"]
    assert "environments 0 to 1 have not answered for 0.05 s" in capsys.readouterr().err


def nap(envs):
    time.sleep(0.3)
    return "awake"


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_same_bits_under_other_start_methods(tmp_path, monkeypatch, method):
    whole = contents(train(tmp_path, "whole", *SHORT))
    monkeypatch.setattr(common, "start_method", lambda: multiprocessing.get_context(method))
    assert contents(train(tmp_path, method, "--workers", 2, *SHORT)) == whole


@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_log_ratios_beyond_float32(log_ratio):
    """The ratio is infinite or 0: the objective has its value, and what has none is named before it reaches a file."""
    n = 4
    dist = torch.distributions.Categorical(logits=torch.zeros(n, 2))
    logp_old = dist.log_prob(torch.zeros(n)) - log_ratio
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, stats = ppo.ppo_loss(
        dist, torch.zeros(n), torch.zeros(n), logp_old, advantages, advantages, clip_eps=0.2, vf_coef=0.5, ent_coef=0.01
    )
    row = torch.cat([stats, torch.ones(1)])[None]
    if log_ratio > 0:
        assert ppo.clipped_surrogate(torch.tensor([torch.inf]), torch.tensor([1.0]), 0.2).item() == pytest.approx(1.2)
        with pytest.raises(common.RunError, match="is inf at gradient step 1"):
            ppo.check_finite(row, torch.zeros(1), torch.zeros(()))
    else:
        assert loss.isfinite()
        ppo.check_finite(row, torch.zeros(1), torch.zeros(()))


@pytest.mark.parametrize("log_std", [50.0, -50.0])
def test_a_sigma_out_of_all_bounds(log_std):
    actor = common.GaussianActor(3, 2, log_std_init=log_std)
    numpy_actor, rng = common.as_numpy(actor), np.random.default_rng(0)
    obs = np.ones((4, 3), np.float32)
    actions = numpy_actor.sample(obs, numpy_actor.noise(rng, 4))
    space = common.make_env("LunarLander-v3", continuous=True).action_space
    assert all(space.contains(action) for action in common.action_map(space)(actions))
    stats = actor(torch.from_numpy(obs)).log_prob(torch.from_numpy(actions)).detach()[:, None]
    if log_std < 0:
        assert stats.isfinite().all()
    else:  # its variance is beyond float32
        with pytest.raises(common.RunError, match="is nan at gradient step 1"):
            ppo.check_finite(stats, torch.zeros(1), torch.zeros(()))


def test_every_file_is_plain(tmp_path, monkeypatch):
    """Tensors and plain types for torch.load, strict JSON without NaN, CSV of numbers."""

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    interrupted(monkeypatch, 3, tmp_path, "stopped", *SHORT)
    for path in [*train(tmp_path, "r", *SHORT).rglob("*"), *(tmp_path / "stopped").rglob("*")]:
        if path.suffix == ".pt":
            torch.load(path, weights_only=True)
        elif path.suffix == ".json":
            json.loads(path.read_text(), parse_constant=no_constant)
        elif path.suffix == ".csv":
            assert all(
                value == "" or float(value) == float(value) for row in common.read_csv(path) for value in row.values()
            )
        else:
            assert path.is_dir() or path.name.startswith("events.out.tfevents")


def test_a_policy_file_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"config": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(common.UsageError, match=r"evil\.pt is not a policy file"):
        common.load_policy(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_it_starts_it_leaves_no_process(tmp_path, sign):
    for delay in (0.5, 1.5, 2.5):
        process = subprocess.Popen(
            command(*TINY, "--runs-dir", tmp_path, "--run-name", f"r{delay}"),
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        time.sleep(delay)
        os.killpg(process.pid, sign)
        assert process.wait(timeout=10) != 0
        assert_nothing_lives(process.pid)
