"""The scripts around ppo.py: evaluation both ways, the reference, figures, table and films."""

import contextlib
import copy
import hashlib
import io
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
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


def script(name, *argv):
    """A script's command line in this process, which has imported it already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = sys.modules[name.removesuffix(".py")].main([str(word) for word in argv])
        except SystemExit as stop:
            code = stop.code
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


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
    assert f"passed over: no final policy in {runs / 'stopped'}\n" in first.stderr
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
    config = common.policy_config("LunarLander-v3")
    assert eval_stochastic.at_the_start(actor, config, [0, 1])["start_entropy"] == pytest.approx(math.log(2))
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
    assert {path.parent for path in tmp_path.rglob("*.png")} == {tmp_path / runs.name}
    names = {path.name for path in tmp_path.rglob("*.png")}
    assert names == {
        "clip.png", "curves-discrete.png", "curves-continuous.png", "ours-and-sb3.png", "kl-estimators.png",
        "deterministic-and-sampled.png", "progression-discrete.png", "progression-continuous.png",
    }  # fmt: skip
    for path in tmp_path.rglob("*.png"):
        assert np.ptp(imageio.imread(path)[..., :3]) > 100
    table = script("plot.py", runs, "--table")
    assert table.returncode == 0 and "| discrete actions | page | this PPO | Stable-Baselines3 |" in table.stdout
    assert fingerprint(runs) == before


def test_no_point_is_invented(runs):
    """Means stand only where every run has a row, and a row cut short is not one."""
    (groups,) = plot.load_runs(runs).values()
    discrete = groups["LunarLander-v3", "ppo", False]
    assert [run.seed for run in discrete] == [0, 1, 2]
    assert [len(run.metrics["env_steps"]) for run in discrete] == [2, 2, 1]
    steps, values = plot.together(discrete, "metrics", "approx_kl")
    assert steps.tolist() == [256] and values.shape == (3, 1)
    assert plot.together(discrete, "metrics", "action_std")[1].size == 0  # empty cells


@pytest.mark.filterwarnings("error", "ignore:.*WARN")  # but for gymnasium's own
@pytest.mark.parametrize(
    ("env_id", "flags", "space", "missing"),
    [
        ("Pendulum-v1", "--norm-obs", "continuous", {}),
        ("tests.envs:Any-v0", "--env-kwargs action=multidiscrete", "discrete", {}),
        ("tests.envs:Walk-v0", "--eval-every 0", "discrete", {"ours-and-sb3": "no evaluations"}),
        pytest.param(  # no training episode ends, and no policy moves
            *("tests.envs:Any-v0", "--env-kwargs limit=200 --learning-rate 1e-30", "discrete"),
            {"kl-estimators": "no finished run's policies at 50 and 100 % differ"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_figures_and_table_of_any_environment(tmp_path, capsys, env_id, flags, space, missing):
    run = ppo.train(ppo.parse_args([*TINY, "--env-id", env_id, *flags.split(), "--runs-dir", str(tmp_path)]))
    capsys.readouterr()
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "figures")]) == 0
    printed = capsys.readouterr().out.splitlines()
    missing = missing | {"deterministic-and-sampled": "run eval_stochastic.py first"}
    assert {line for line in printed if not line.endswith(".png")} == {f"{k}: {why}" for k, why in missing.items()}
    drawn = {path.stem for path in (tmp_path / "figures" / tmp_path.name).iterdir()}
    assert drawn == {"clip", f"curves-{space}", "ours-and-sb3", "kl-estimators"} - missing.keys()
    assert plot.main([str(tmp_path), "--table"]) == 0
    table = capsys.readouterr().out
    assert f"| {space} actions | this PPO | Stable-Baselines3 |" in table
    assert "solved" not in table and "page" not in table and "at least" not in table
    shutil.rmtree(run / "snapshots")
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "figures")]) == 0
    assert "kl-estimators: no finished run's" in capsys.readouterr().out


def test_an_observations_statistics_move_with_the_policy():
    """On the way from old to new, what --norm-obs keeps goes too; at its end the KL is that to new."""
    torch.manual_seed(0)
    old, new = (common.GaussianActor(3, 2, norm_obs=True) for _ in range(2))
    for actor, scale in ((old, 1), (new, 3)):
        torch.nn.init.orthogonal_(actor.net.layers[-1].weight)
        actor.net.norm.update(scale * torch.randn(100, 3) + scale)
    before, obs = copy.deepcopy(old.state_dict()), torch.randn(50, 3)
    exact, *_ = plot.estimator_errors(old, new, obs, [0.0, 1.0])
    with torch.no_grad():
        expected = torch.distributions.kl_divergence(old(obs), new(obs)).mean()
    assert exact.tolist() == pytest.approx([0, expected.item()], abs=1e-6) and expected > 1e-4
    assert all((old.state_dict()[name] == value).all() for name, value in before.items())


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory):
    """The runs of two environments, without policies."""
    root = tmp_path_factory.mktemp("tasks")
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        for run in (ROOT / "runs" / "tasks").glob(f"*ppo_{env_id}_s*"):
            shutil.copytree(run, root / run.name, ignore=shutil.ignore_patterns("*.pt"))
    return root


def test_several_environments_are_one_figure(two_tasks, tmp_path, capsys):
    assert plot.main([str(two_tasks), "--out", str(tmp_path)]) == 0
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png")] == [f"{two_tasks.name}/tasks.png"]
    (groups,) = plot.load_runs(two_tasks).values()
    cartpole, pendulum = plot.figure_tasks(groups).axes
    returns = np.concatenate([run.evals["mean_return"] for run in groups["Pendulum-v1", "ppo", True]])
    low, high = pendulum.get_ylim()
    assert low < returns.min() < low + 0.1 * (high - low) and high - 0.1 * (high - low) < returns.max() < high
    lines = [{line.get_label() for line in axis.lines} for axis in (cartpole, pendulum)]
    assert "solved" in lines[0] - lines[1] and {"this PPO", "Stable-Baselines3"} <= lines[0] & lines[1]
    plot.main([str(two_tasks), "--env-id", "CartPole-v1", "--table"])
    assert "solved (return at least 475)" in capsys.readouterr().out


def test_several_environments_are_a_row_each(two_tasks, tmp_path, capsys):
    def rows(root):
        assert plot.main([str(root), "--table"]) == 0
        return [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]

    head, _, cartpole, pendulum = rows(two_tasks)
    assert head[0].endswith("50 held-out episodes") and (cartpole[0], pendulum[0]) == ("CartPole-v1", "Pendulum-v1")
    results = [common.read_json(two_tasks / f"ppo_Pendulum-v1_s{seed}" / "result.json") for seed in range(3)]
    returns = [result["final"]["mean_return"] for result in results]
    assert pendulum[2].startswith(f"{np.mean(returns):.1f} ± {np.std(returns, ddof=1):.1f} [")
    assert (pendulum[1], pendulum[5]) == ("102,400", "3")

    shutil.copytree(two_tasks, tmp_path / "tasks")
    names = sorted(run.name for run in two_tasks.iterdir())
    empty = dict.fromkeys(eval_stochastic.FIELDS)
    rows_now = [empty | {"run": name, "episodes": 100, "deterministic_mean": len(name)} for name in names]
    text = common.csv_text(eval_stochastic.FIELDS, rows_now)
    (tmp_path / "tasks" / eval_stochastic.CSV_NAME).write_text(text)
    head, _, cartpole, pendulum = rows(tmp_path)
    assert head[0].endswith("return on 100 held-out episodes")
    assert cartpole[2:4] == pendulum[2:4] == ["18.0 ± 0.0 [18.0, 18.0]", "22.0 ± 0.0 [22.0, 22.0]"]


def test_an_environment_that_is_not_installed_is_passed_over(runs, tmp_path, monkeypatch):
    """But where none is, that is the error. Runs without a policy take one line together."""
    for name in ("ppo_LunarLander-v3_s0", "ppo_LunarLander-v3-continuous_s0"):
        shutil.copytree(runs / name, tmp_path / name)
    for name in "abc":
        shutil.copytree(runs / "stopped", tmp_path / name)
    make, missing = gym.make, "MuJoCo is not installed, run `pip install mujoco`"

    def evaluate_without(is_missing):
        def make_or_not(spec, **kwargs):
            if is_missing(kwargs):
                raise gym.error.DependencyNotInstalled(missing)
            return make(spec, **kwargs)

        monkeypatch.setattr(gym, "make", make_or_not)
        return script("eval_stochastic.py", tmp_path, "--episodes", 1, "--workers", 1)

    neither = evaluate_without(lambda kwargs: True)
    assert neither.returncode == 2 and missing in neither.stderr and not (tmp_path / eval_stochastic.CSV_NAME).exists()
    one = evaluate_without(lambda kwargs: kwargs.get("continuous", False))
    assert one.returncode == 0 and f"passed over: {tmp_path / 'ppo_LunarLander-v3-continuous_s0'}" in one.stderr
    assert f"passed over: no final policy in {tmp_path / 'a'} and 2 more\n" in one.stderr
    assert [row["run"] for row in common.read_csv(tmp_path / eval_stochastic.CSV_NAME)] == ["ppo_LunarLander-v3_s0"]


def test_settings_are_compared(tmp_path, capsys):
    """Runs in one folder that differ in more than the seed: a row each, named by the flags that differ."""
    settings = ([], ["--clip-eps", "0.1"], ["--objective", "kl-fixed", "--kl-beta", "10"], ["--objective", "none"])
    for i, flags in enumerate(settings):
        for seed in (0, 1):
            argv = ["--env-id", "CartPole-v1", "--seed", str(seed), "--run-name", f"r{i}{seed}", *flags]
            ppo.train(ppo.parse_args([*TINY, "--runs-dir", str(tmp_path), *argv]))
    capsys.readouterr()
    zero = plot.random_return(common.read_json(tmp_path / "r00" / "config.json")["policy"])
    assert 10 < zero < 40
    results = {path.parent.name: common.read_json(path) for path in sorted(tmp_path.glob("*/result.json"))}
    for (name, result), above in zip(results.items(), (80, 120, 50, 50, -30, 10, 0, 0), strict=True):
        result["diagnostics"]["train_return_last"] = zero + above
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    assert plot.main([str(tmp_path), "--table"]) == 0
    papers, ours = (
        [line.strip("| ").split(" | ") for line in table.splitlines()][2:]
        for table in capsys.readouterr().out.split("\n\n")[:2]
    )
    for rows in papers, ours:
        assert [row[0].strip("`") for row in rows] == [" ".join(flags) or "default" for flags in settings]
    assert [float(row[1]) for row in papers] == [0.82, 0.76, 0.69, -0.39]
    assert [row[2] for row in papers] == [
        "1.00 ± 0.28 [0.80, 1.20]", "0.50 ± 0.00 [0.50, 0.50]", "-0.10 ± 0.28 [-0.30, 0.10]", "0.00 ± 0.00 [0.00, 0.00]"
    ]  # fmt: skip
    for i, row in enumerate(ours):
        returns = [results[f"r{i}{seed}"]["final"]["mean_return"] for seed in (0, 1)]
        assert row[1].startswith(f"{np.mean(returns):.1f} ± ")
        assert row[-1] == "2"
    assert plot.main([str(tmp_path), "--out", str(tmp_path / "figures")]) == 0
    assert [path.name for path in tmp_path.rglob("*.png")] == ["settings-discrete.png"]
    for path in tmp_path.glob("*/result.json"):  # nothing has ended
        path.unlink()
    assert plot.main([str(tmp_path), "--table"]) == 0
    assert "\n| default | 0.82 |  |\n" in capsys.readouterr().out


@pytest.mark.parametrize("progression", [False, pytest.param(True, marks=pytest.mark.slow)])
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("folder", "marker", "parts"),
    [("reference", "results", None), ("tasks", "tasks", None), ("surrogate", "surrogates", 1)],
)
def test_the_readme_shows_the_table_of_the_runs(folder, marker, parts):
    """All that is printed, or its first table."""
    shown = (ROOT / "README.md").read_text().partition(f"<!-- {marker} -->\n")[2].partition(f"<!-- /{marker} -->")[0]
    printed = script("plot.py", ROOT / "runs" / folder, "--table")
    assert printed.returncode == 0 and shown.strip() == "\n\n".join(printed.stdout.split("\n\n")[:parts]).strip()


def test_the_readmes_pictures_are_there():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", (ROOT / "README.md").read_text())
    assert pictures and all((ROOT / picture).exists() for picture in pictures)
