"""Whole runs: the command line, exactness, resuming, faults and learning."""

import json
import os
import random
import re
import signal
import subprocess
import sys
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
    children,
    command,
    contents,
    refused,
    script,
    stop_midway,
    train,
)  # fmt: skip


@pytest.mark.parametrize("space", [[], pytest.param(["--continuous"], marks=pytest.mark.slow)])
def test_same_bits_for_any_number_of_workers_and_any_evaluation(tmp_path, space):
    argv = ["--total-timesteps", 1024, *space]
    one = contents(train(tmp_path, "one", "--workers", 1, "--eval-every", 256, *argv))
    for workers in (2, 3):
        assert contents(train(tmp_path, f"w{workers}", "--workers", workers, "--eval-every", 256, *argv)) == one
    off = train(tmp_path, "off", "--workers", 2, *argv)
    rarer = train(tmp_path, "rarer", "--workers", 1, "--eval-every", 512, *argv)
    without = contents(tmp_path / "one", evals=False)
    assert contents(off, evals=False) == contents(rarer, evals=False) == without
    assert not (off / "best.pt").exists()
    assert set(common.read_csv(rarer / "evals.csv")[0].items()) <= set(
        common.read_csv(tmp_path / "one/evals.csv")[1].items()
    )
    assert contents(train(tmp_path, "other", "--seed", 1, *argv), evals=False) != without


@pytest.mark.parametrize(("space", "kills"), [([], 1), pytest.param(["--continuous"], 3, marks=pytest.mark.slow)])
def test_killed_and_resumed_is_the_undisturbed_run(tmp_path, capsys, space, kills):
    argv = ["--eval-every", 512, "--total-timesteps", 4000, *space]
    whole, run = train(tmp_path, "whole", *argv), tmp_path / "killed"
    argv = [*TINY, *argv, "--runs-dir", tmp_path, "--run-name", "killed"]
    rng = random.Random(0)
    for _ in range(kills):
        process = subprocess.Popen(command(*argv), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        before = (run / "checkpoint.pt").stat().st_mtime_ns if (run / "checkpoint.pt").exists() else 0
        while process.poll() is None:
            if (run / "checkpoint.pt").exists() and (run / "checkpoint.pt").stat().st_mtime_ns != before:
                break
            time.sleep(0.005)
        time.sleep(rng.random() / 5)
        process.kill()
        process.wait()
        assert_nothing_lives(process.pid)
    assert "resuming at" in script(*argv, check=True).stdout
    assert contents(run) == contents(whole)
    assert not (run / "checkpoint.pt").exists()
    capsys.readouterr()
    assert ppo.main([str(word) for word in argv]) == 0
    assert "finished already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sign", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_stopping_leaves_no_process_and_says_how_to_go_on(tmp_path, sign, code):
    process = stop_midway(
        tmp_path, "stopped", lambda p: os.killpg(p.pid, sign) if sign == signal.SIGINT else p.terminate()
    )
    assert process.returncode == code and process.took < 5
    assert re.search(r"stopped after [\d,]+ steps; to go on: python ppo.py --num-envs 4", process.err)
    assert "Traceback" not in process.err and "--overwrite" not in process.err
    assert common.load_tensors(tmp_path / "stopped" / "checkpoint.pt")["update"] > 0
    assert_nothing_lives(process.pid)


def test_a_dead_worker_ends_the_run_in_one_line(tmp_path):
    def kill_a_worker(process):
        server = next(c for c in children(process.pid) if children(c))
        os.kill(children(server)[0], signal.SIGKILL)

    process = stop_midway(tmp_path, "orphan", kill_a_worker, "--workers", 2)
    assert process.returncode == 1
    assert re.search(r"worker \d \(environments \d to \d\) died", process.err) and "Traceback" not in process.err
    assert_nothing_lives(process.pid)
    assert common.load_tensors(tmp_path / "orphan" / "checkpoint.pt")["update"] > 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"raised in step: ValueError: the motor is on fire"),
        pytest.param("reward", r"reward that is not finite: nan", marks=pytest.mark.slow),
        pytest.param("observation", r"observation that is not finite: \[inf", marks=pytest.mark.slow),
    ],
)
def test_a_faulty_environment_is_named(tmp_path, fault, message):
    argv = ["--env-id", f"tests.envs:Walk-{fault}-v0", "--runs-dir", tmp_path, "--run-name", "r"]
    result = script(*TINY, *argv)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert re.search(r"environment \d at its step \d+ .*" + message, result.stderr)


def test_a_diverging_loss_is_named_before_it_reaches_a_file(tmp_path):
    with pytest.raises(common.RunError, match=r"is (nan|-?inf) at gradient step"):
        train(tmp_path, "r", "--learning-rate", 1e30, "--env-id", "tests.envs:Walk-v0")
    checkpoint = tmp_path / "r" / "checkpoint.pt"
    assert not checkpoint.exists() or common.load_tensors(checkpoint)["learner"]["theta"].isfinite().all()


@pytest.mark.slow
def test_an_environment_that_is_not_deterministic_goes_on_from_fresh_episodes(tmp_path):
    env = ["--env-id", "tests.envs:Walk-random-v0"]
    stop_midway(tmp_path, "r", lambda p: p.kill(), *env)
    argv = [*TINY, "--total-timesteps", 10**6, "--runs-dir", tmp_path, "--run-name", "r", *env]
    process = subprocess.Popen(command(*argv), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(3)]
    process.kill()
    assert any("is not deterministic" in line for line in lines), lines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-envs", "0"], "0 is not between 1 and 65536"),
        (["--num-steps", "-3"], "-3 is not at least 1"),
        (["--update-epochs", "none"], "'none' is not a whole number"),
        (["--gamma", "1.5"], "1.5 is not between 0 and 1"),
        (["--learning-rate", "nan"], "nan is not at least 0"),
        (["--seed", "-1"], "-1 is not between 0 and"),
        (["--num-envs", "2", "--num-steps", "8"], "smaller than --minibatch-size 64"),
        (["--env-id", "LunarLander-v2"], "did you mean LunarLander-v3?"),
        (["--env-id", "CartPool-v1"], "did you mean CartPole-v1?"),
        (["--env-id", "no_such_module:Thing-v0"], "No module named 'no_such_module'"),
        (["--env-id", "CartPole-v1", "--continuous"], "no variant with continuous actions"),
        (
            ["--env-id", "tests.envs:OddActions-v0"],
            "actions must be Discrete, MultiDiscrete, MultiBinary or a Box of floats",
        ),
        (["--env-id", "tests.envs:OddObservations-v0"], "observations must be a Box or Discrete"),
        (["--env-id", "CartPole-v1", "--env-kwargs", "speed=3"], "CartPole-v1 cannot be made: TypeError"),
        (["--env-kwargs", "gravity"], "--env-kwargs takes key=value, not 'gravity'"),
        (["--num-envs", "60000", "--num-steps", "10000000"], "GB, and this machine has"),
        (["--hidden", "10000000", "10000000"], "GB, and this machine has"),
        (["--log-std-init", "50"], "50 is not between -10 and 2"),
        (["--run-name", "../elsewhere"], "is not the name of a folder"),
        (["--run-name", ".."], "is not the name of a folder"),
        (["--run-name", ""], "is not the name of a folder"),
        (["--runs-dir", "/proc/nowhere"], "cannot write the run folder"),
    ],
)
def test_bad_input_takes_one_line_and_writes_nothing(tmp_path, argv, message):
    code, lines = refused("--runs-dir", tmp_path, *argv)
    assert code == 2 and message in lines[-1]
    assert not list(tmp_path.iterdir())


def test_bad_input_as_a_user_gives_it(tmp_path):
    result = script("--runs-dir", tmp_path, "--env-id", "CartPool-v1")
    assert result.returncode == 2 and not list(tmp_path.iterdir())
    assert result.stderr.splitlines() == [
        "ppo.py: error: there is no environment 'CartPool-v1'; did you mean CartPole-v1?"
    ]


def test_missing_box2d_is_answered_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(common.UsageError, match=r"pip install 'gymnasium\[box2d\]'"):
        common.make_env("LunarLander-v3")


def test_a_folder_made_with_other_arguments_is_refused(tmp_path):
    run = train(tmp_path, "r", "--total-timesteps", 256)
    before = (run / "result.json").read_bytes()
    with pytest.raises(common.UsageError, match=r"--gamma 0.999 \(now 0.9\)"):
        train(tmp_path, "r", "--total-timesteps", 256, "--gamma", 0.9)
    assert (run / "result.json").read_bytes() == before
    train(tmp_path, "r", "--total-timesteps", 256, "--workers", 1)  # finished: nothing to do
    train(tmp_path, "r", "--total-timesteps", 256, "--gamma", 0.9, "--overwrite")
    assert json.loads((run / "config.json").read_text())["args"]["gamma"] == 0.9
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(common.UsageError, match="not a run folder"):
        train(tmp_path, "mine", "--overwrite")


def test_run_folder(tmp_path, capsys):
    """300 steps in rollouts of 256: the second runs past the budget; the update's figures are in its own row."""
    run = train(tmp_path, "r", "--total-timesteps", 300, "--eval-every", 256)
    rows = common.read_csv(run / "metrics.csv")
    assert [row["env_steps"] for row in rows] == ["256", "512"]
    assert [row["gradient_steps"] for row in rows] == ["10", "20"]  # 2 epochs of 60, 60, 60, 60, 16
    assert tuple(rows[0]) == common.METRICS
    assert all(float(row["exact_kl"]) > 0 and row["action_std"] == "" for row in rows)
    assert sorted(p.name for p in (run / "snapshots").iterdir()) == [f"{p:05.1f}.pt" for p in common.SNAPSHOTS]
    result = json.loads((run / "result.json").read_text())
    assert len(result["final"]["returns"]) == 50 and result["env_steps"] == 512
    assert [float(row["env_steps"]) for row in common.read_csv(run / "evals.csv")] == [256, 512]
    actor, config = common.load_policy(run / "final.pt")
    again = common.evaluate(actor, config, common.FINAL_SEEDS[:5])
    assert again["return"].tolist() == result["final"]["returns"][:5]
    out = capsys.readouterr().out.splitlines()
    assert any(line.strip().startswith("final policy") for line in out) and "diagnostics" in out[-1]
    assert list(run.glob("events.out.tfevents*"))


def test_no_return_before_an_episode_has_ended(tmp_path):
    argv = ["--num-steps", 16, "--minibatch-size", 64, "--total-timesteps", 64, "--env-id", "Pendulum-v1"]
    assert common.read_csv(train(tmp_path, "r", *argv) / "metrics.csv")[0]["train_return_100"] == ""


def test_an_episode_does_not_depend_on_its_company():
    config = common.policy_config("LunarLander-v3")
    torch.manual_seed(0)
    actor = common.build_actor(config)
    for deterministic in (True, False):
        together = common.evaluate(actor, config, common.EVAL_SEEDS[:4], deterministic)
        alone = common.evaluate(actor, config, common.EVAL_SEEDS[2:3], deterministic)
        assert all(together[field][2] == alone[field][0] for field in common.EPISODE_FIELDS[:3])
        assert together["fuel"][2] == alone["fuel"][0]


def test_fuel_is_the_engine_penalty():
    """0.30 for the main engine and 0.03 for a side engine, by throttle where actions are continuous."""
    assert [common.lander_fuel(a) for a in range(4)] == [0, 0.03, 0.30, 0.03]
    assert common.lander_fuel(np.array([-0.5, 0.4])) == 0
    assert common.lander_fuel(np.array([1.0, -1.0])) == pytest.approx(0.33)
    assert common.lander_fuel(np.array([0.5, 0.75])) == pytest.approx(0.30 * 0.75 + 0.03 * 0.75)


def test_stored_actions_are_not_clipped_but_the_environments_are():
    env = common.make_env("Pendulum-v1")
    actions = np.array([[-7.0], [0.5], [7.0]], np.float32)
    assert common.action_map(env.action_space)(actions).tolist() == [[-2.0], [1.0], [2.0]]
    assert actions.tolist() == [[-7.0], [0.5], [7.0]]


def test_replay_reaches_the_same_state():
    """Both action spaces, in fresh environments and in used ones."""
    for continuous in (False, True):
        config = common.policy_config("LunarLander-v3", continuous)
        log, rng = common.EpisodeLog(3), np.random.default_rng(0)
        envs = common.Envs(config, 5, 3, range(3))
        envs.begin(log.count)
        shape = (150, 3, 2) if continuous else (150, 3)
        actions = rng.normal(size=shape).astype(np.float32) if continuous else rng.integers(0, 4, shape)
        steps = [envs.step(a)[:3] for a in actions]
        rewards, terminated, truncated = (np.array(x) for x in zip(*steps, strict=True))
        log.add(rewards, terminated | truncated, actions, envs.current)
        for other in (common.Envs(config, 5, 3, range(3)), envs):
            assert other.begin(log.count, 150, [np.concatenate(a) for a in log.actions], log.obs) == []
            assert (other.current == log.obs).all()


def test_verdict_names_what_is_unhealthy():
    healthy = {
        "approx_kl_max": 0.01, "clip_frac_max": 0.1, "clip_frac_above_0.3": 0.0, "explained_variance_end": 0.9,
        "train_return_last": 150.0, "action_std_first": None, "action_std_last": None,
    }  # fmt: skip
    assert common.verdict(healthy, 260).startswith("healthy")
    assert "KL spike" in common.verdict(healthy | {"approx_kl_max": 0.5}, 260)
    assert "clip fraction above 0.3 in 20%" in common.verdict(healthy | {"clip_frac_above_0.3": 0.2}, 260)
    for explained in -0.4, -1.7e-8:  # worse than a constant; a constant
        assert "no better than a constant" in common.verdict(healthy | {"explained_variance_end": explained}, 260)
    sigma = {"action_std_first": 1.0, "action_std_last": 0.9}
    assert "understates" in common.verdict(healthy | sigma, 260)
    assert common.verdict(healthy | sigma, 151).startswith("healthy")


def test_held_out_seeds_are_not_trained_on():
    assert all(common.episode_seed(s, i, k) < 2**28 for s in range(3) for i in range(3) for k in range(3))
    assert min(common.EVAL_SEEDS) == 1_000_000_000 and len(common.FINAL_SEEDS) == 50 and len(common.VIDEO_SEEDS) == 24


def test_help_gives_every_default_and_fits_two_screens():
    text = script("--help", check=True).stdout
    assert len(text.splitlines()) <= 75
    for part in (
        "N: environments [16]",
        "K: passes over a rollout [4]",
        "eps: half-width of the clip [0.2]",
        "may run past it",
    ):
        assert part in text


@pytest.mark.slow
def test_without_a_compiler_it_trains_all_the_same(tmp_path):
    environment = os.environ | {"CXX": "/nonexistent/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    argv = [a for a in TINY if a != "--no-compile"]
    result = script(*argv, "--total-timesteps", 256, "--runs-dir", tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert len([line for line in result.stderr.splitlines() if "could not be compiled" in line]) == 1


def test_learns_cartpole(tmp_path):
    argv = "--env-id CartPole-v1 --num-envs 8 --num-steps 128 --minibatch-size 128 --update-epochs 8 --gamma 0.98"
    argv += " --gae-lambda 0.9 --learning-rate 0.001 --total-timesteps 40000"
    run = train(tmp_path, "cartpole", *argv.split())
    assert json.loads((run / "result.json").read_text())["final"]["mean_return"] >= 400
