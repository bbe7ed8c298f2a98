"""The scripts around ppo.py: evaluation both ways, the reference, figures, table and films."""

import copy
import hashlib
import math
import subprocess
import sys
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
import scipy.stats
import torch

import common
import eval_stochastic
import plot
import ppo
import record
import sb3_reference

ROOT = Path(__file__).parent.parent
TINY = ["--num-envs", "4", "--num-steps", "64", "--minibatch-size", "64", "--update-epochs", "1", "--no-compile"]
TINY += ["--eval-every", "256", "--total-timesteps", "512"]


def script(*argv):
    return subprocess.run(
        [sys.executable, *map(str, argv)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def fingerprint(folder):
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two finished runs of ours, one of Stable-Baselines3, and one that was stopped in mid-line."""
    root = tmp_path_factory.mktemp("runs")
    for argv in ([], ["--seed", "1"], ["--continuous"]):
        ppo.train(ppo.parse_args([*TINY, "--runs-dir", str(root), *argv]))
    flags = [flag for flag in TINY if flag != "--no-compile"]
    sb3_reference.train(*sb3_reference.parse_args([*flags, "--runs-dir", str(root)]))
    stopped = root / "stopped"
    stopped.mkdir()
    for name in ("config.json", "metrics.csv", "evals.csv"):
        text = (root / "ppo_LunarLander-v3_s1" / name).read_text()
        (stopped / name).write_text(text.replace('"seed": 1', '"seed": 2') if name == "config.json" else text[:-20])
    return root


def test_both_ways_of_every_run_and_again_the_same(runs):
    first = script("eval_stochastic.py", runs)
    assert first.returncode == 0, first.stderr
    assert "stopped has no final policy yet" in first.stderr
    rows = common.read_csv(runs / eval_stochastic.CSV_NAME)
    assert [row["run"] for row in rows] == [
        "ppo_LunarLander-v3-continuous_s0", "ppo_LunarLander-v3_s0", "ppo_LunarLander-v3_s1",
        "sb3-ppo_LunarLander-v3_s0",
    ]  # fmt: skip
    for row in rows:
        actor, config = common.load_policy(runs / row["run"] / "final.pt")
        for way, deterministic in (("deterministic", True), ("sampled", False)):
            returns = common.evaluate(actor, config, common.FINAL_SEEDS[:3], deterministic)["return"]
            assert np.isfinite(returns).all() and float(row[f"{way}_mean"])
        assert float(row["difference_low"]) < float(row["difference"]) < float(row["difference_high"])
    before = (runs / eval_stochastic.CSV_NAME).read_bytes()
    one_worker = script("eval_stochastic.py", runs, "--workers", 1)
    assert one_worker.stdout == first.stdout
    assert (runs / eval_stochastic.CSV_NAME).read_bytes() == before


def test_one_run_alone(runs):
    result = script("eval_stochastic.py", runs / "ppo_LunarLander-v3_s0")
    assert result.returncode == 0 and "ppo_LunarLander-v3_s0" in result.stdout
    (runs / "ppo_LunarLander-v3_s0" / eval_stochastic.CSV_NAME).unlink()


@pytest.mark.parametrize("name", ["eval_stochastic.py", "plot.py", "record.py"])
def test_a_folder_without_runs_is_one_line(tmp_path, name):
    result = script(name, tmp_path)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and str(tmp_path) in result.stderr


def test_two_equal_logits():
    """Deterministic play takes the first of them every time, sampled play each half the time; the entropy is ln 2."""
    actor = common.CategoricalActor(8, 4)
    with torch.no_grad():
        actor.net.layers[-1].weight.zero_()
        actor.net.layers[-1].bias.copy_(torch.tensor([-50.0, 0.0, 0.0, -50.0]))
    config = {"env_id": "LunarLander-v3", "continuous": False, "env_kwargs": {}}
    assert eval_stochastic.start_entropy(actor, config, [0, 1]) == pytest.approx(math.log(2))
    numpy_actor, env = common.as_numpy(actor), common.make_env("LunarLander-v3")
    assert {int(action) for _, action, *_ in common.play(numpy_actor, env, 0)} == {1}
    sampled = [int(action) for seed in range(10) for _, action, *_ in common.play(numpy_actor, env, seed, False)]
    assert set(sampled) == {1, 2} and abs(np.mean(sampled) - 1.5) < 3 * 0.5 / math.sqrt(len(sampled))


def test_intervals_are_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 50))
    expected = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
    mean, low, high = eval_stochastic.paired_interval(a - b)
    assert (mean, low, high) == pytest.approx(((a - b).mean(), expected.low, expected.high))
    assert eval_stochastic.paired_interval([3.0])[0] == 3.0 and math.isnan(eval_stochastic.paired_interval([3.0])[1])
    reference = scipy.stats.bootstrap((a,), np.mean, n_resamples=20_000, method="percentile", rng=0).confidence_interval
    assert plot.bootstrap(a, resamples=20_000) == pytest.approx((reference.low, reference.high), abs=0.01)


def test_the_reference_is_read_like_ours(runs):
    run = runs / "sb3-ppo_LunarLander-v3_s0"
    rows = common.read_csv(run / "metrics.csv")
    assert [int(row["env_steps"]) for row in rows] == [256, 512]
    assert all(row[k] for row in rows for k in ("exact_kl", "clip_frac", "entropy", "explained_variance", "value_loss"))
    assert [row["env_steps"] for row in common.read_csv(run / "evals.csv")] == ["256", "512"]
    assert len(common.read_json(run / "result.json")["final"]["returns"]) == 50
    assert "finished already" in script("sb3_reference.py", *TINY[:-5], *TINY[-4:], "--runs-dir", runs).stdout


def test_the_reference_policy_acts_as_stable_baselines3_does():
    for continuous in (False, True):
        args, _ = sb3_reference.parse_args(["--num-envs", "1", *["--continuous"] * continuous])
        model = sb3_reference.make_model(args)
        policy = model.policy
        config = common.policy_config(args.env_id, continuous)
        actor = common.load_weights(common.build_actor(config), sb3_reference.actor_weights(model))
        obs = torch.randn(20, 8)
        expected, _ = policy.predict(obs.numpy(), deterministic=True)
        mode = actor.mode(obs).detach().numpy()
        np.testing.assert_allclose(mode.clip(-1, 1) if continuous else mode, expected, atol=1e-6)


@pytest.mark.parametrize("argv", [["--workers", "1"], ["--no-compile"], ["--algo", "a2c", "--clip-eps", "0.1"]])
def test_a_flag_without_counterpart_is_refused(argv):
    with pytest.raises(SystemExit) as stop:
        sb3_reference.parse_args(argv)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    "kwargs",
    [
        ["observation=discrete", "action=start"],
        ["observation=image", "action=multibinary-2d"],
        ["observation=scalar", "action=multidiscrete"],
        ["action=one-sided"],
        ["action=wide"],
    ],
)
def test_the_reference_has_our_spaces(tmp_path, kwargs):
    """Also those that Stable-Baselines3 refuses or lays out otherwise: one-hot, flat and as our actor reads them.

    The environment itself refuses an action that is not in its space.
    """
    argv = ["--env-id", "tests.envs:Any-v0", "--num-envs", "2", "--num-steps", "32", "--total-timesteps", "64"]
    argv += ["--norm-obs", "--eval-every", "0", "--runs-dir", str(tmp_path), "--env-kwargs", *kwargs]
    args, _ = sb3_reference.parse_args(argv)
    model = sb3_reference.make_model(args)
    obs = model.env.reset()  # which moves the statistics
    actor = common.load_weights(common.build_actor(common.config_of(args)), sb3_reference.actor_weights(model))
    expected, _ = model.predict(obs, deterministic=True)
    ours = actor.mode(torch.from_numpy(model.env.get_original_obs()).float())
    np.testing.assert_allclose(ours.detach().numpy(), expected, atol=1e-6)
    run = sb3_reference.train(args, "ppo")
    row = common.read_csv(run / "metrics.csv")[0]
    assert all(math.isfinite(float(row[k])) for k in ("exact_kl", "entropy", "value_loss"))
    assert common.load_policy(run / "final.pt")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--env-id", "Pendulum-v1", "--learning-rate", "1e30"],
            "the policy's distribution is out of float32's range; the same",
        ),
        (
            ["--env-id", "tests.envs:Walk-raise-v0"],
            "Stable-Baselines3 raised ValueError: the motor is on fire; to go on",
        ),
    ],
)
def test_what_stops_the_reference_is_one_line(tmp_path, capsys, argv, message):
    argv = ["--num-envs", "2", "--num-steps", "64", "--eval-every", "0", "--runs-dir", str(tmp_path), *argv]
    assert sb3_reference.main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sb3_reference.py: stopped: {message}")


@pytest.mark.parametrize("algo", ["a2c", "trpo"])
def test_other_algorithms(tmp_path, algo):
    if algo == "trpo":
        pytest.importorskip("sb3_contrib")
    argv = ["--algo", algo, "--num-envs", "4", "--num-steps", "64", "--total-timesteps", "512", "--eval-every", "0"]
    run = sb3_reference.train(*sb3_reference.parse_args([*argv, "--runs-dir", str(tmp_path)]))
    assert len(common.read_csv(run / "metrics.csv")) == 2 and (run / "final.pt").exists()


@pytest.mark.parametrize("algo", ["ppo", "trpo"])
def test_the_reference_goes_on_where_it_was_stopped(tmp_path, monkeypatch, algo):
    argv = ["--algo", algo, "--num-envs", "4", "--num-steps", "64", "--total-timesteps", "768", "--eval-every", "0"]
    argv += ["--runs-dir", str(tmp_path)]
    log_update = common.Run.log_update

    def stop_in_the_second_update(run, *args):
        log_update(run, *args)
        if run.update == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(common.Run, "log_update", stop_in_the_second_update)
    with pytest.raises(KeyboardInterrupt):
        sb3_reference.train(*sb3_reference.parse_args(argv))
    monkeypatch.undo()
    (folder,) = tmp_path.iterdir()
    learner = common.load_tensors(folder / "checkpoint.pt")["learner"]
    watch, policies = sb3_reference.watch, []

    def note_the_policy(model):
        policies.append(copy.deepcopy(model.policy.state_dict()))
        watch(model)

    monkeypatch.setattr(sb3_reference, "watch", note_the_policy)
    sb3_reference.train(*sb3_reference.parse_args(argv))
    assert all((policies[0][name] == value).all() for name, value in learner["policy"].items())
    rows = common.read_csv(folder / "metrics.csv")
    assert [row["env_steps"] for row in rows] == ["256", "512", "768"]


def test_figures_and_table_from_run_folders(runs, tmp_path):
    script("eval_stochastic.py", runs)
    before = fingerprint(runs)
    result = script("plot.py", runs, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "clip.png", "curves-discrete.png", "curves-continuous.png", "ours-and-sb3.png", "kl-estimators.png",
        "deterministic-and-sampled.png", "progression-discrete.png", "progression-continuous.png",
    }  # fmt: skip
    for path in tmp_path.iterdir():
        assert np.ptp(imageio.imread(path)[..., :3]) > 100
    table = script("plot.py", runs, "--table")
    assert table.returncode == 0 and "| discrete actions | page | this PPO | Stable-Baselines3 |" in table.stdout
    assert fingerprint(runs) == before


def test_no_point_is_invented(runs):
    """Means stand only where every run has a row, and a row cut short is not one."""
    groups = plot.load_runs(runs)
    discrete = groups["LunarLander-v3", "ppo", False]
    assert [run.seed for run in discrete] == [0, 1, 2]
    assert [len(run.metrics["env_steps"]) for run in discrete] == [2, 2, 1]
    steps, values = plot.together(discrete, "metrics", "approx_kl")
    assert steps.tolist() == [256] and values.shape == (3, 1)
    assert plot.together(discrete, "metrics", "action_std")[1].size == 0  # empty cells


@pytest.mark.parametrize("progression", [False, True])
def test_film(runs, tmp_path, progression):
    run, film = runs / "ppo_LunarLander-v3_s0", tmp_path / "film.mp4"
    before = fingerprint(run)
    argv = ["--progression", "--seed", "7"] if progression else []
    result = script("record.py", run, "--out", film, *argv)
    assert result.returncode == 0, result.stderr
    config = common.load_policy(run / "best.pt")[1]
    if progression:
        paths = sorted((run / "snapshots").iterdir())
        expected = sum(common.evaluate(*common.load_policy(path), [7])["length"][0] for path in paths)
    else:
        episodes = common.evaluate(*common.load_policy(run / "best.pt"), common.VIDEO_SEEDS)
        expected = episodes["length"][record.choose(episodes, config["solved_return"])].sum()
        assert "of 24 score at least 200" in result.stdout
    with imageio.get_reader(film) as reader:
        assert reader.get_meta_data()["codec"].startswith("h264") and reader.get_meta_data()["size"] == (640, 400)
        pictures = [picture for picture in reader]
    assert len(pictures) == expected
    assert all(np.ptp(picture) > 100 for picture in pictures[::50])
    assert fingerprint(run) == before and list(tmp_path.iterdir()) == [film]


@pytest.mark.parametrize(("name", "out"), [("plot.py", "file/x"), ("record.py", "file/x.mp4"), ("record.py", "x.txt")])
def test_a_place_that_cannot_be_written_is_one_line(runs, tmp_path, name, out):
    (tmp_path / "file").write_text("")
    folder = runs if name == "plot.py" else runs / "ppo_LunarLander-v3_s0"
    result = script(name, folder, "--out", tmp_path / out)
    assert result.returncode == 2 and str(tmp_path) in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_gif_is_small(runs, tmp_path):
    result = script("record.py", runs / "ppo_LunarLander-v3_s0", "--progression", "--out", tmp_path / "film.gif")
    assert result.returncode == 0, result.stderr
    with imageio.get_reader(tmp_path / "film.gif") as reader:
        pictures = list(reader)
    assert f"film.gif: {len(pictures)} frames" in result.stdout and pictures[0].shape[:2] == (200, 320)


def test_failures_are_filmed_first():
    episodes = {"return": np.array([250.0, 100.0, 260.0, -50.0, 270.0])}
    assert record.choose(episodes, 200) == [1, 3, 0, 2]
    assert record.choose(episodes, None, 2) == [3, 1]


def test_the_readme_shows_the_table_of_the_reference_runs():
    shown = (ROOT / "README.md").read_text().partition("<!-- results -->\n")[2].partition("<!-- /results -->")[0]
    printed = script("plot.py", "runs/reference", "--table")
    assert printed.returncode == 0 and shown.strip() == printed.stdout.strip()
