"""What the tests share: tiny runs, in this process or as a user starts them."""

import contextlib
import csv
import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck

import common
import ppo

ROOT = Path(__file__).parent.parent
TINY = ["--num-envs", "4", "--num-steps", "64", "--minibatch-size", "60", "--update-epochs", "2", "--no-compile"]
TINY += ["--eval-every", "0"]
FUZZ = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
TIME_COLUMNS = {"rollout_s", "update_s", "eval_s", "steps_per_s"}


def command(*argv):
    return [sys.executable, "ppo.py", *map(str, argv)]


def script(*argv, **kwargs):
    return subprocess.run(command(*argv), cwd=ROOT, capture_output=True, text=True, timeout=120, **kwargs)


def train(tmp_path, name, *argv):
    return ppo.train(ppo.parse_args([*TINY, "--runs-dir", str(tmp_path), "--run-name", name, *map(str, argv)]))


def contents(run, evals=True):
    """Everything of a run that must be the same, bit for bit."""
    with open(run / "metrics.csv") as file:
        rows = [{k: v for k, v in row.items() if k not in TIME_COLUMNS} for row in csv.DictReader(file)]
    files = [run / "final.pt", *sorted((run / "snapshots").iterdir())]
    files += [run / "best.pt", run / "evals.csv"] if evals else []
    return rows, {str(f.relative_to(run)): f.read_bytes() for f in files}


def living(group):
    """The processes of a process group that have not ended: {pid: command line}."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            pass
    return found


def assert_nothing_lives(group):
    deadline = time.monotonic() + 5
    while living(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living(group) == {}


def refused(*argv):
    """ppo.py's command line in this process, stopped before it trains: (exit code, lines on standard error)."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            code = ppo.main([str(word) for word in argv])
        except SystemExit as stop:
            code = stop.code
    assert "Traceback" not in errors.getvalue()
    return code, errors.getvalue().splitlines()


def interrupted(monkeypatch, updates, *args):
    """`train`, stopped as Ctrl-C does it once it has made so many updates, with a checkpoint of each."""
    log_update, save_checkpoint = common.Run.log_update, common.Run.save_checkpoint

    def log_and_stop(run, *row):
        if run.update == updates:
            raise KeyboardInterrupt
        log_update(run, *row)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common.Run, "log_update", log_and_stop)
        patch.setattr(common.Run, "save_checkpoint", lambda run, learner: save_checkpoint(run, learner, now=True))
        train(*args)


def stop_midway(tmp_path, name, how, *argv):
    """Start a run, call how(process) once it has a checkpoint, and return the ended process."""
    run = tmp_path / name
    argv = [*TINY, "--total-timesteps", 10**6, "--runs-dir", tmp_path, "--run-name", name, "--overwrite", *argv]
    process = subprocess.Popen(
        command(*argv), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (run / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.01)
    how(process)
    start = time.monotonic()
    process.out, process.err = process.communicate(timeout=30)
    process.took = time.monotonic() - start
    return process


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class WorkersHere:
    """common.Workers with one worker, in this process: a run takes milliseconds."""

    def __init__(self, num_workers, config, seed, num_envs):
        self.envs, self.connections, self.rows = None, [None], [range(num_envs)]
        self.make = lambda: common.Envs(config, seed, num_envs, range(num_envs))

    def start(self, function, *args):
        self.start_each(function, [args])

    def start_each(self, function, arguments):
        try:
            self.envs = self.envs or self.make()
            self.answers = [function(self.envs, *args) for args in arguments]
        except common.RunError as error:
            raise common.RunError(str(error)) from None

    def results(self):
        return self.answers

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass
