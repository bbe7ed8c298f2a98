"""The command line under arguments that nobody thought of: ppo.py trains to a finite end, or says in a line why not."""

import contextlib
import io
import itertools
import math
import multiprocessing.forkserver
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

import common
import ppo
from tests.helpers import FUZZ, ROOT, WorkersHere, children, refused

# fmt: off
# Words that train, for each flag: a run given nothing else ends with code 0.
FINE = {
    "--seed": ["0", "7", "4294967295", "\uff11", " 1 ", "+1"],
    "--num-envs": ["1", "2", "3", "4", "\u0664"],
    "--num-steps": ["2", "5", "16", "64", "6_4", "0_3"],
    "--total-timesteps": ["1", "7", "64", "65", "300", "1_0"],
    "--eval-every": ["0", "1", "50", "1000000", "9" * 30],
    "--update-epochs": ["1", "2", "3"],
    "--minibatch-size": ["2"],
    "--gamma": ["0", "1", "0.999", "-0.0", "1e-400", "0_0.9", "\u0660"],
    "--gae-lambda": ["0", "1", "0.98", "-0.0", "1e-400"],
    "--clip-eps": ["0", "-0.0", "0.2", "1", "1e38", "1e-300"],
    "--vf-coef": ["0", "0.5", "-0.0", "1e-300"],
    "--ent-coef": ["0", "0.01", "-0.0", "1e-300"],
    "--learning-rate": ["0", "-0.0", "3e-4", "1e-300", "1e-3"],
    "--adam-eps": ["1e-12", "1e-5", "1", "1e38"],
    "--max-grad-norm": ["1e-6", "0.5", "1e30"],
    "--target-kl": ["1e-9", "0.01", "1e38"],
    "--activation": ["tanh", "relu"],
    "--workers": ["1", "2", "4", "256"],
    "--run-name": [
        "r", " ", "a b", "[x]*?", "'\"", "läuft-学习-🚀", "-x", "--seed", "~", "$HOME", "...", "%s{}", "a\\b",
        "r" * 255,
    ],
    "--runs-dir": ["runs", "", ".", "a/b/c", "-", "[x] y", "学习", "x/../y", "%d"],
}
# Words that must be refused.
BAD_NUMBERS = ["", " ", "x", "nan", "-inf", "inf", "1e400", "-1", "1" * 5000, "9" * 400, "0x10", "1__0", "1\n2", "\0"]
BAD = {
    **{flag: BAD_NUMBERS for flag in FINE},
    **{flag: [*BAD_NUMBERS, "1e39"] for flag in ("--clip-eps", "--vf-coef", "--ent-coef", "--learning-rate")},
    "--num-envs": [*BAD_NUMBERS, "0", "65537", "1.0"],
    "--num-steps": [*BAD_NUMBERS, "0", "1" * 15, "1" * 35],
    "--total-timesteps": [*BAD_NUMBERS, "0", "1.5"],
    "--minibatch-size": [*BAD_NUMBERS, "0", "1", "1000", "9" * 30],
    "--gamma": [*BAD_NUMBERS, "1.0000001"],
    "--log-std-init": ["nan", "-10.1", "2.1", "inf"],
    "--hidden": [*BAD_NUMBERS, "0", "9" * 35],
    "--activation": ["", "gelu", "Tanh"],
    "--objective": ["", "KL"],
    "--kl-beta": [*BAD_NUMBERS, "1"],
    "--std": ["", "log"],
    "--run-name": ["", ".", "..", "a/b", "/", "/etc", "../x", "\0", "a\0b", "a\nb", "r" * 300, "\ud800", "學" * 86],
    "--runs-dir": ["\0", "/proc/x", "/dev/null", "x" * 300, "\ud800", "\udcff", "/dev/null/a"],
    "--env-id": [
        "", " ", ":", "CartPole", "CartPole-v9", "cartpole-v1", "..:x", ".x:y", "a:b:c", "x:CartPole-v1", "\0", "\0:x",
        "%s", "🚀", "CartPole-v1\n", "tests.envs:", "tests.envs:OddActions-v0", "/etc/passwd", "-v1", "x" * 5000,
        "json:a", "\ud800", "\ud800:x",
    ],
    "--env-kwargs": [
        "", "=", "=3", "a b=1", "speed=3", "1=2", "\0=1", "id=3", "env_id=3", "continuous=true", "max_episode_steps=x",
        "kwargs={}", "self=1", "class=1",
    ],
    "--nonsense": ["", "1"],
}
# Words that may lead anywhere but to a traceback.
EXTREME = {
    "--learning-rate": ["1", "1e3", "1e10", "1e30", "1e38"],
    "--vf-coef": ["1e10", "1e38"],
    "--ent-coef": ["1e10", "1e38"],
    "--log-std-init": ["-10", "2", "0", "-0.0"],
    "--objective": ["clip", "none", "kl-fixed", "kl-adaptive"],
    "--kl-beta": ["0", "1e-300", "3", "1e38"],
    "--kl-target": ["1e-9", "0.01", "1e38"],
    "--ent-coef-final": ["0", "0.1", "1e38"],
    "--target-entropy": ["-1e6", "-2", "0", "1e38"],
    "--std": ["global", "state"],
    "--max-grad-norm": ["1e38"],
    "--env-kwargs": [
        "max_episode_steps=1", "max_episode_steps=0", "max_episode_steps=1.5", "max_episode_steps=-1",
        "render_mode=rgb_array", "disable_env_checker=true", "x=" + "[" * 1000, "x=" + "9" * 5000, "fault=raise",
        "g=1e999", "g=1e308", "limit=1",
        "goal_velocity=x", "observation=discrete", "action=multidiscrete", "action=huge", "reward=array",
    ],
}
# fmt: on
SWITCHES = ["--norm-obs", "--norm-reward", "--clip-vloss", "--anneal-lr", "--no-norm-adv", "--no-ortho-init"]
ENV_IDS = ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "tests.envs:Walk-v0", "tests.envs:Any-v0"]
SMALL = {"--env-id": "CartPole-v1", "--num-envs": "2", "--num-steps": "16", "--minibatch-size": "16"}
SMALL |= {"--update-epochs": "1", "--total-timesteps": "40", "--eval-every": "0", "--run-name": "r", "--workers": "1"}


@st.composite
def command_lines(draw):
    """(argv, exit codes that are right for it)."""
    words = SMALL | {"--env-id": draw(st.sampled_from(ENV_IDS))}
    codes = {0}
    for table, most, its_codes in ((FINE, 6, {0}), (EXTREME, 2, {0, 1, 2}), (BAD, 1, {2})):
        if table is FINE or draw(st.integers(0, 3)) == 0:
            for flag in draw(st.lists(st.sampled_from(sorted(table)), max_size=most, unique=True)):
                words[flag] = draw(st.sampled_from(table[flag]))
                codes = its_codes if its_codes != {0} else codes
                if table is FINE and flag in ("--num-envs", "--num-steps"):
                    words["--minibatch-size"] = "2"
    parts = [[f"{flag}={word}"] for flag, word in words.items()]
    parts += [[switch] for switch in draw(st.lists(st.sampled_from(SWITCHES), unique=True))]
    if "--hidden" not in words and draw(st.booleans()):
        parts += [["--hidden", *draw(st.lists(st.sampled_from(["1", "3", "16"]), min_size=1, max_size=3))]]
    if words["--env-id"] in ENV_IDS[1:3] and draw(st.booleans()):
        parts += [["--continuous"]]
    return [*itertools.chain(*draw(st.permutations(parts))), "--no-compile"], codes


def at_the_command_line(argv, folder):
    """ppo.main(argv) in a fresh working directory: (exit code, standard error)."""
    out, errors, here = io.StringIO(), io.StringIO(), os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                code = ppo.main(argv)
            except SystemExit as stop:
                code = stop.code
    finally:
        os.chdir(here)
    return code, errors.getvalue()


def check(argv, codes):
    """What holds for every command line, see the module's first line; codes: the exit codes that are right."""
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "work"
        folder.mkdir()
        code, errors = at_the_command_line(argv, folder)
        assert code in codes, f"exit code {code}: {errors}"
        files = {path for path in folder.rglob("*") if not path.is_dir()}
        if code:
            said = [line for line in errors.splitlines() if line.startswith("ppo.py: ")]
            assert len(said) == 1 and errors.endswith(said[0] + "\n")
            assert errors.startswith("usage: ") or errors.count("\n") == 1
        if code == 2:
            assert not files
        if code == 0:
            assert errors == ""
            (run,) = {path.parent for path in files if path.name == "result.json"}
            assert all(run in path.parents for path in files) and not list(run.glob("checkpoint*"))
            args = ppo.parse_args(argv)
            rows = common.read_csv(run / "metrics.csv")
            assert len(rows) == math.ceil(args.total_timesteps / (args.num_envs * args.num_steps))
            assert all(text == "" or math.isfinite(float(text)) for row in rows for text in row.values())
            common.load_policy(run / "final.pt")  # refuses weights that are not finite
        assert not list(folder.rglob("*.tmp"))
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    assert not (server and children(server)), "a worker outlived its run"


@pytest.fixture(scope="module", autouse=True)
def short_evaluations():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "FINAL_SEEDS", common.FINAL_SEEDS[:2])
        patch.setattr(common, "EVAL_SEEDS", common.EVAL_SEEDS[:2])
        yield


@settings(**FUZZ, max_examples=40)
@given(command_lines())
def test_any_command_line(drawn):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "Workers", WorkersHere)
        check(*drawn)


@pytest.mark.slow
@settings(**FUZZ, max_examples=120)
@given(command_lines())
def test_any_command_line_with_worker_processes(drawn):
    check(*drawn)


@pytest.mark.parametrize("flag", BAD)
def test_bad_words_are_refused(flag):
    for word in BAD[flag]:
        check([f"{name}={value}" for name, value in (SMALL | {flag: word}).items()], {2})


@pytest.mark.parametrize(
    "argv",
    [
        ["--learning-rate=1"],  # probabilities that round to 0: the exact KL is finite all the same
        ["--env-id=Pendulum-v1", "--env-kwargs", "disable_env_checker=true", "render_mode=rgb_array"],
        ["--run-name=" + "r" * 255, "--runs-dir=[x] 学习"],
    ],
)
def test_odd_but_right(argv):
    given = {part.partition("=")[0] for part in argv}
    check([*(f"{flag}={word}" for flag, word in SMALL.items() if flag not in given), *argv, "--no-compile"], {0})


def test_a_kl_where_a_probability_rounds_to_0():
    p, q = (Categorical(logits=torch.tensor(logits)) for logits in ([0.0, 0.0], [300.0, 0.0]))
    assert kl_divergence(p, q).item() == pytest.approx(150 - math.log(2))
    assert kl_divergence(q, p).item() == pytest.approx(math.log(2))


def test_an_environment_whose_module_cannot_be_imported(tmp_path, monkeypatch):
    """In any way, and with --continuous, which asks its class for a keyword first."""
    (tmp_path / "broken_module.py").write_text("import gymnasium\ngymnasium.register('Br-v0', 'nowhere:x')\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, lines = refused("--env-id", "broken_module:Br-v0")
    assert code == 2 and lines == [
        "ppo.py: error: there is no environment 'broken_module:Br-v0': division by zero; did you mean Br-v0?"
    ]
    code, lines = refused("--env-id", "Br-v0", "--continuous")
    gymnasium.registry.pop("Br-v0")
    assert code == 2 and lines == [
        "ppo.py: error: Br-v0 cannot be made: ModuleNotFoundError: No module named 'nowhere'"
    ]


@pytest.mark.slow
def test_closed_streams_and_a_reader_that_has_gone(tmp_path):
    words = [f"{flag}={word}" for flag, word in (SMALL | {"--runs-dir": tmp_path}).items()]
    line = shlex.join([sys.executable, "ppo.py", *words, "--no-compile"])
    assert subprocess.run(f"{line} <&- >&- 2>&-", shell=True, cwd=ROOT, timeout=60).returncode == 0
    assert (tmp_path / "r" / "result.json").exists()
    again = subprocess.run(
        f"env -u PYTHONUNBUFFERED {line} | true", shell=True, cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert again.stderr == ""
