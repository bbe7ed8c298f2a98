"""ppo.py's command line, fuzzed: it trains to a finite end, or refuses in one line with exit code 2."""

import contextlib
import io
import math
import warnings

import pytest
import torch
from helpers import FUZZ, WorkersHere
from hypothesis import example, given, settings
from hypothesis import strategies as st

import common
import ppo


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "Workers", WorkersHere)
        patch.setattr(common, "FINAL_SEEDS", common.FINAL_SEEDS[:2])
        patch.setattr(common, "EVAL_SEEDS", common.EVAL_SEEDS[:1])
        yield


ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "tests.envs:Walk-v0", "tests.envs:Any-v0")
OTHER_IDS = ("CartPole", "nowhere:X-v0", ":", "Blackjack-v1")
ODD_TEXT = ("x y", "[x]", "{x}", "*", "~", "$HOME", "%s", "é ü", "", " ", ".", "..", "../x", "/x", "-x", "--", "\u202e")
ODD_TEXT += ("a\nb", "\0", "x" * 300)
ODD_NUMBERS = (
    "-1",
    "0",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e38",
    "1e-45",
    "1_0",
    "\uff11",
    "0x10",
    "",
    "x",
    "9" * 30,
)


def mostly(usual, odd=ODD_NUMBERS):
    return st.one_of(*[st.sampled_from(usual)] * 8, st.sampled_from(odd))


VALUES = {
    "--seed": mostly(("0", "7", str(2**32 - 1))),
    "--total-timesteps": mostly(("1", "15", "16", "17", "33")),
    "--eval-every": mostly(("0", "1", "16")),
    "--num-envs": mostly(("1", "2", "3", "5"), (*ODD_NUMBERS, "65537")),
    "--num-steps": mostly(("3", "8", "9"), (*ODD_NUMBERS, "1", "100000000")),
    "--update-epochs": mostly(("1", "2")),
    "--minibatch-size": mostly(("2", "3", "8")),
    "--gamma": mostly(("0", "0.9", "1")),
    "--gae-lambda": mostly(("0", "0.9", "1")),
    "--clip-eps": mostly(("0", "0.2", "1000")),
    "--vf-coef": mostly(("0", "0.5", "1e10")),
    "--ent-coef": mostly(("0", "0.01", "1e10")),
    "--learning-rate": mostly(("0", "0.001", "1")),
    "--adam-eps": mostly(("1e-5", "1e-12", "1")),
    "--max-grad-norm": mostly(("0.5", "1e-6", "1e9")),
    "--hidden": mostly(("1", "8", "33"), (*ODD_NUMBERS, "100000000")),
    "--target-kl": mostly(("1e-9", "0.1")),
    "--log-std-init": mostly(("-10", "0.5", "2")),
    "--kl-beta": mostly(("0", "3")),
    "--kl-target": mostly(("0.01",)),
    "--ent-coef-final": mostly(("0", "0.1")),
    "--target-entropy": mostly(("-2", "0.5")),
    "--objective": mostly(("clip", "none", "kl-fixed", "kl-adaptive"), ("KL",)),
    "--std": mostly(("global", "state")),
    "--activation": mostly(("tanh", "relu"), ("sine",)),
    "--env-kwargs": st.sampled_from(["max_episode_steps=3", "x", "x=1", "=1", "a b=1"]),
    "--env-id": mostly(ENVIRONMENTS, ODD_TEXT + OTHER_IDS),
    "--run-name": st.sampled_from(ODD_TEXT),
    "--workers": mostly(("1", "2", "100")),
}
SWITCHES = ("--norm-obs", "--norm-reward", "--clip-vloss", "--anneal-lr", "--no-norm-adv", "--no-ortho-init")
SWITCHES += ("--overwrite", "--continuous", "--x")


@st.composite
def command_lines(draw):
    chosen = draw(st.lists(st.sampled_from([*VALUES]), unique=True, max_size=5))
    argv = [word for flag in chosen for word in (flag, draw(VALUES[flag]))]
    return argv + draw(st.lists(st.sampled_from(SWITCHES), max_size=2))


SMALL = ["--env-id", "Pendulum-v1", "--num-envs", "2", "--num-steps", "8", "--minibatch-size", "4", "--hidden", "8"]
SMALL += ["--total-timesteps", "33", "--no-compile"]  # later words win


def check(tmp_path, argv):
    root, out, errors = tmp_path / "root", io.StringIO(), io.StringIO()
    runs = root / "runs"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium's, about its own environments
        try:
            code = ppo.main([*SMALL, "--runs-dir", str(runs), *argv])
        except SystemExit as stop:
            code = stop.code
    lines = [line for line in errors.getvalue().splitlines() if not line.startswith("usage: ")]
    made = list(runs.iterdir()) if runs.exists() else []
    assert set(root.iterdir() if root.exists() else ()) <= {runs} and len(made) <= 1
    if code == 2:
        assert len(lines) == 1 and "error: " in lines[0] and not made, (lines, made)
        return code
    if code == 1:  # a number has overflowed, and the checkpoint is from before it did
        assert (
            len(lines) == 1
            and "stopped: " in lines[0]
            and any(word in lines[0] for word in (" inf", " nan", "not finite"))
        ), lines
        return code
    assert code == 0 and not [line for line in lines if "could not" in line], lines
    (run,) = made
    config, rows = common.read_json(run / "config.json")["args"], common.read_csv(run / "metrics.csv")
    assert len(rows) == math.ceil(config["total_timesteps"] / (config["num_envs"] * config["num_steps"]))
    assert all(math.isfinite(float(value or 0)) for row in rows for value in row.values()), rows
    policy = torch.load(run / "final.pt", weights_only=True)["actor"]
    assert all(value.isfinite().all() for value in policy.values())
    assert (run / "result.json").exists() and not list(run.glob("*.tmp")) and not list(run.glob("checkpoint*"))
    return code


@settings(max_examples=60, **FUZZ)
@given(command_lines())
@example([])
def test_it_trains_or_refuses(tmp_path_factory, argv):
    check(tmp_path_factory.mktemp("fuzz"), argv)


@pytest.mark.slow
@settings(max_examples=500, **FUZZ)
@given(command_lines())
def test_it_trains_or_refuses_at_length(tmp_path_factory, argv):
    check(tmp_path_factory.mktemp("fuzz"), argv)
