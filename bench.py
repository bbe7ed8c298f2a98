"""Speed: this PPO, Stable-Baselines3 and bare environment stepping, measured in turn in one run.

    python bench.py                  # LunarLander-v3, discrete actions: about two minutes
    python bench.py --continuous

A machine's speed drifts, so every round measures all three and the ratios are of medians over rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from stable_baselines3 import PPO

import common
import ppo
import sb3_reference


def spread(values):
    """[median, smallest, largest] of measurements."""
    return [statistics.median(values), min(values), max(values)]


def microseconds(function, *args):
    start = time.perf_counter()
    function(*args)
    return (time.perf_counter() - start) * 1e6


# ---------------------------------------------------------------------------------------------
# This PPO: whole processes, as a user starts them
# ---------------------------------------------------------------------------------------------


class OurRun:
    """`python ppo.py` for some rollouts, in a process of its own, timed by its own metrics.csv."""

    def __init__(self, argv, rollouts, env=None):
        args = ppo.parse_args(argv)
        steps = rollouts * args.num_envs * args.num_steps
        self.folder = tempfile.TemporaryDirectory()
        self.metrics = Path(self.folder.name, "bench", "metrics.csv")
        self.first_row_s, self.memory_mb = None, []
        command = [sys.executable, "ppo.py", *argv, "--total-timesteps", str(steps)]
        command += ["--runs-dir", self.folder.name, "--run-name", "bench"]
        here, environ = Path(__file__).parent, os.environ | (env or {})
        self.start = time.perf_counter()
        self.process = subprocess.Popen(
            command, cwd=here, env=environ, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self, watch_memory=False):
        """Wait for its end. Then `rows` holds the figures of each rollout but the first, which warms up."""
        while self.process.poll() is None:
            if self.first_row_s is None:
                if self.metrics.exists() and self.metrics.read_text().count("\n") > 1:
                    self.first_row_s = time.perf_counter() - self.start
            elif watch_memory:
                self.memory_mb.append(group_memory_mb(self.process.pid))
            time.sleep(0.02 if self.first_row_s is None else 0.2)
        if self.process.returncode:
            raise common.RunError(f"ppo.py ended with exit code {self.process.returncode}")
        rows = [{k: float(v) for k, v in row.items() if v} for row in common.read_csv(self.metrics)]
        self.after_last_row_s = time.time() - self.metrics.stat().st_mtime
        self.rows = rows[1:]
        self.folder.cleanup()
        return self

    @property
    def steps_per_s(self):
        return statistics.harmonic_mean([row["steps_per_s"] for row in self.rows])


def group_memory_mb(group):
    """Memory of a process group: proportional set sizes, which count what processes share once. Linux only."""
    kilobytes = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int((process / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                rollup = (process / "smaps_rollup").read_text()
                kilobytes += int(rollup.partition("\nPss:")[2].split()[0])
        except (OSError, IndexError):
            pass  # it has ended meanwhile
    return kilobytes / 1024


# ---------------------------------------------------------------------------------------------
# What it is compared with
# ---------------------------------------------------------------------------------------------


def step_bare(envs, num_steps):
    """Steps per second of one process that steps its environment with random actions and does nothing else."""
    env = envs.envs[0]
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(num_steps)]
    env.reset(seed=0)
    start = time.perf_counter()
    for t, action in enumerate(actions):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset(seed=t)
    return num_steps / (time.perf_counter() - start)


class TimedPPO(PPO):
    """Stable-Baselines3's PPO that notes how long its gradient steps take."""

    def train(self):
        self.train_us = microseconds(super().train)


def make_sb3(args):
    """Stable-Baselines3 at ppo.py's hyper-parameters, warmed up by one rollout. args: from ppo.parse_args."""
    return sb3_reference.make_model(args, algorithm=TimedPPO).learn(args.num_envs * args.num_steps)


def run_sb3(model, threads):
    """One rollout and its update: (steps/s, microseconds per gradient step)."""
    torch.set_num_threads(threads)
    batch_size = model.n_envs * model.n_steps
    seconds = microseconds(lambda: model.learn(batch_size, reset_num_timesteps=False)) / 1e6
    gradient_steps = model.n_epochs * -(-batch_size // model.batch_size)
    return batch_size / seconds, model.train_us / gradient_steps


# ---------------------------------------------------------------------------------------------
# Its parts, in this process
# ---------------------------------------------------------------------------------------------


class Parts:
    """The learner's side of one rollout: its update in pieces, and single decisions of the actor."""

    def __init__(self, args, config):
        torch.set_num_threads(1)
        self.args, self.obs_dim = args, config["obs_dim"]
        self.batch_size = args.num_envs * args.num_steps
        self.nets = ppo.ActorCritic(common.build_actor(config), common.build_critic(config))
        self.learner = ppo.make_learner(self.nets, args)
        self.rollout = ppo.example_rollout(config, self.batch_size)
        self.steps = self.compile() if args.compile else ppo.make_minibatch_steps(self.nets, args)

    def compile(self):
        shape = ppo.MINIBATCHES_PER_CALL, self.args.minibatch_size
        return ppo.compile_steps(ppo.make_minibatch_steps(self.nets, self.args), {shape}, self.learner, self.rollout)

    @torch.no_grad()
    def gradient_steps_us(self, count=512):
        torch.set_num_threads(1)
        per_call = ppo.MINIBATCHES_PER_CALL
        calls = torch.randint(self.batch_size, (count // per_call, per_call, self.args.minibatch_size))
        return [microseconds(self.steps, *self.learner.values(), idx, *self.rollout) / per_call for idx in calls]

    @torch.no_grad()
    def values_and_gae_s(self):
        shape = self.args.num_steps, self.args.num_envs
        obs, rewards, dones = torch.randn(*shape, self.obs_dim), torch.randn(shape), torch.zeros(shape)

        def values_and_gae():
            dist, values = self.nets(obs)
            dist.log_prob(dist.sample())
            ppo.compute_gae(rewards, values, dones, values[0], self.args.gamma, self.args.gae_lambda)

        return min(microseconds(values_and_gae) for _ in range(3)) / 1e6

    @torch.inference_mode()
    def decision_us(self, count=2000):
        """One deterministic action at batch size 1 as a torch module; common.decision_us plays it in NumPy."""
        obs = torch.randn(1, self.obs_dim)
        return statistics.median(microseconds(self.nets.actor.mode, obs) for _ in range(count))


# ---------------------------------------------------------------------------------------------
# The whole bench
# ---------------------------------------------------------------------------------------------


def bench(argv, rounds, rollouts):
    """All measurements as {name: number or [median, smallest, largest]}. argv: ppo.py's arguments."""
    args = ppo.parse_args(argv)
    config = common.config_of(args)
    cores, batch_size = common.available_cores(), args.num_envs * args.num_steps
    quiet = [*argv, "--eval-every", "0"]
    parts, sb3 = Parts(args, config), make_sb3(args)
    ours, bare, gradient_us, sb3_runs = [], [], [], {threads: [] for threads in {1, cores}}
    with common.Workers(cores, config, 0, cores) as workers:
        for _ in range(rounds):
            ours.append(OurRun(quiet, rollouts).wait())
            workers.start(step_bare, 20 * args.num_steps)
            bare.append(sum(workers.results()))
            gradient_us += parts.gradient_steps_us()
            for threads, runs in sb3_runs.items():
                runs.append(run_sb3(sb3, threads))
    evaluated = OurRun(argv, rollouts).wait(watch_memory=True)
    pair = [OurRun([*quiet, "--workers", "1"], rollouts) for _ in range(2)]
    pair_speed = sum(run.wait().steps_per_s for run in pair)
    cold_s = None
    if args.compile:
        with tempfile.TemporaryDirectory() as cache:
            cold_s = OurRun(quiet, 3, {"TORCHINDUCTOR_CACHE_DIR": cache}).wait().first_row_s

    rows = [row for run in ours for row in run.rows]
    speed = statistics.median(run.steps_per_s for run in ours)
    bare_speed = statistics.median(bare)
    best = max(sb3_runs.values(), key=lambda runs: statistics.median(speed for speed, _ in runs))
    sb3_speeds, sb3_us = zip(*best, strict=True)
    gradient_step = statistics.median(gradient_us)
    first_row = statistics.median(run.first_row_s for run in ours)
    waiting = sum(row["eval_s"] for row in evaluated.rows) / sum(batch_size / r["steps_per_s"] for r in evaluated.rows)
    budget = 2_000_000 if config["actor"] == "categorical" else 1_000_000
    found = {
        "this PPO, steps/s": spread([run.steps_per_s for run in ours]),
        "Stable-Baselines3, steps/s": spread(sb3_speeds),
        f"bare stepping on {cores} cores, steps/s": spread(bare),
        "this PPO / Stable-Baselines3": speed / statistics.median(sb3_speeds),
        "this PPO / bare stepping": speed / bare_speed,
        "rollout / bare stepping": batch_size / statistics.median(row["rollout_s"] for row in rows) / bare_speed,
        "rollout, s": spread([row["rollout_s"] for row in rows]),
        "update, s": spread([row["update_s"] for row in rows]),
        "  of it values, log-probabilities and GAE, s": parts.values_and_gae_s(),
        "gradient step, us": spread(gradient_us),
        "Stable-Baselines3's gradient step, us": spread(sb3_us),
        "gradient step, times faster": statistics.median(sb3_us) / gradient_step,
        "waiting for evaluations, share of the time": waiting,
        "from the last row to the end, both final evaluations, s": evaluated.after_last_row_s,
        "compile, cache warm, s": microseconds(parts.compile) / 1e6 if args.compile else None,
        "start to the first row of metrics.csv, cache warm, s": spread([run.first_row_s for run in ours]),
        "start to the first row of metrics.csv, cache cold, s": cold_s,
        f"a whole run of {budget:,} steps, evaluations included, minutes": (
            first_row + budget / speed / (1 - waiting) + evaluated.after_last_row_s
        )
        / 60,
        "two runs with one worker side by side / this PPO": pair_speed / speed,
        "memory of all processes, MB": spread(evaluated.memory_mb) if any(evaluated.memory_mb) else None,
        "one decision at batch size 1, torch, us": parts.decision_us(),
        "one decision at batch size 1, NumPy, us": common.decision_us(parts.nets.actor, config),
    }
    return {name: value for name, value in found.items() if value is not None}


def scale(argv, rollouts):
    """A Markdown table of steps/s over workers, environments and layer sizes, as its lines."""
    num_envs = (8, 16, 32, 64)
    yield f"| hidden | workers | {' | '.join(f'{n} environments' for n in num_envs)} |"
    yield "|---|---|" + "---|" * len(num_envs)
    for hidden in ("64", "256"):
        for workers in sorted({1, common.available_cores()}):
            flags = [*argv, "--eval-every", "0", "--workers", str(workers), "--hidden", hidden, hidden]
            speeds = (OurRun([*flags, "--num-envs", str(n)], rollouts).wait().steps_per_s for n in num_envs)
            yield f"| {hidden}, {hidden} | {workers} | {' | '.join(f'{speed:,.0f}' for speed in speeds)} |"


def parse_args(argv=None):
    """(arguments of the bench, ppo.py's arguments)."""
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description=f"{__doc__.splitlines()[0]} Any flag of ppo.py may be given too, such as "
        "--env-id, --continuous, --workers, --num-envs or --hidden.",
        allow_abbrev=False,
    )
    count = common.number(int, 1)
    parser.add_argument("--rounds", type=count, default=3, metavar="INT", help="turns of each of the three [3]")
    parser.add_argument("--rollouts", type=common.number(int, 3), default=10, metavar="INT", help="a turn of ours [10]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--scale", action="store_true", help="steps/s over workers, environments and layer sizes instead"
    )
    args, rest = parser.parse_known_args(argv)
    ppo.parse_args(rest)  # so that what it refuses is refused before anything is measured
    return args, rest


def main(argv=None):
    def script():
        args, ppo_argv = parse_args(argv)
        if args.scale:
            for line in scale(ppo_argv, args.rollouts):
                print(line, flush=True)
            return
        found = bench(ppo_argv, args.rounds, args.rollouts)
        if args.json:
            print(json.dumps(found, indent=2))
            return
        for name, value in found.items():
            middle, *ends = value if isinstance(value, list) else [value]
            digits = 0 if middle >= 100 else 3
            between = f"  ({ends[0]:,.{digits}f} to {ends[1]:,.{digits}f})" if ends else ""
            print(f"{name:<62} {middle:>10,.{digits}f}{between}")

    return common.run_script("bench.py", script)


if __name__ == "__main__":
    sys.exit(main())
