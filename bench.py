"""Speed: this PPO, Stable-Baselines3 and bare environment stepping, measured in turn in one run.

    python bench.py                  # LunarLander-v3, discrete actions: about two minutes
    python bench.py --continuous

A machine's speed drifts, so every round measures all three and the ratios are of medians over rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

import common
import ppo


def spread(values):
    """[median, smallest, largest] of the measurements of all rounds."""
    return [statistics.median(values), min(values), max(values)]


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


def run_ours(args, rollouts, eval_every=0):
    """A run of ppo.py as a user starts it. Returns seconds to the first row, and the rows after it as floats."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "ppo.py", "--runs-dir", folder, "--run-name", "bench", *ppo_arguments(args)]
        command += [
            "--total-timesteps",
            str(rollouts * args.num_envs * args.num_steps),
            "--eval-every",
            str(eval_every),
        ]
        metrics = Path(folder, "bench", "metrics.csv")
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 1):
            time.sleep(0.02)
        first_row = time.perf_counter() - start
        if process.wait():
            raise common.RunError(f"ppo.py ended with exit code {process.returncode}")
        rows = [{k: float(v) for k, v in row.items() if v} for row in common.read_csv(metrics)]
    return first_row, rows[1:]


def ppo_arguments(args):
    argv = ["--env-id", args.env_id, "--workers", str(args.workers)]
    argv += ["--num-envs", str(args.num_envs), "--num-steps", str(args.num_steps)]
    return argv + ["--continuous"] * args.continuous + ["--no-compile"] * (not args.compile)


class TimedPPO(PPO):
    """Stable-Baselines3's PPO that notes how long its gradient steps take."""

    def train(self):
        start = time.perf_counter()
        super().train()
        self.train_s = time.perf_counter() - start


def make_sb3(args):
    """Stable-Baselines3 at the page's hyper-parameters, warmed up by one rollout."""
    kwargs = {"continuous": True} if args.continuous else {}
    envs = make_vec_env(args.env_id, args.num_envs, seed=0, env_kwargs=kwargs)
    model = TimedPPO(
        "MlpPolicy", envs, n_steps=args.num_steps, batch_size=64, n_epochs=4, gamma=0.999, gae_lambda=0.98,
        ent_coef=0.01, device="cpu", seed=0,
    )  # fmt: skip
    return model.learn(args.num_envs * args.num_steps)


def run_sb3(model, threads):
    """One rollout and its update: (steps/s, microseconds per gradient step)."""
    torch.set_num_threads(threads)
    batch_size = model.n_envs * model.n_steps
    start = time.perf_counter()
    model.learn(batch_size, reset_num_timesteps=False)
    gradient_steps = model.n_epochs * -(-batch_size // model.batch_size)
    return batch_size / (time.perf_counter() - start), model.train_s / gradient_steps * 1e6


def time_parts(args, config):
    """Seconds to compile, microseconds per gradient step, and seconds of values, log-probabilities and GAE."""
    torch.set_num_threads(1)
    defaults = ppo.parse_args(ppo_arguments(args))
    batch_size = args.num_envs * args.num_steps
    nets = ppo.ActorCritic(common.build_actor(config), common.Critic(config["obs_dim"]))
    theta = ppo.flatten(nets)
    state = theta, torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros((), dtype=torch.float64)
    rollout = ppo.example_rollout(config, batch_size)
    step = ppo.make_minibatch_step(nets, defaults)
    start = time.perf_counter()
    if args.compile:
        step = ppo.compile_step(step, {defaults.minibatch_size}, theta, rollout)
    compile_s = time.perf_counter() - start

    shape = args.num_steps, args.num_envs
    start = time.perf_counter()
    with torch.no_grad():
        dist, values = nets(torch.randn(*shape, config["obs_dim"]))
        dist.log_prob(dist.sample())
        ppo.compute_gae(torch.randn(shape), values, torch.zeros(shape), values[0], 0.999, 0.98)
    gae_s = time.perf_counter() - start

    times = []
    for idx in torch.randperm(batch_size).repeat(8).split(defaults.minibatch_size)[:512]:
        start = time.perf_counter()
        with torch.no_grad():
            step(*state, idx, *rollout)
        times.append((time.perf_counter() - start) * 1e6)
    return compile_s, statistics.median(times), gae_s


def bench(args):
    """All measurements as {name: number or [median, smallest, largest]}."""
    config = common.policy_config(args.env_id, args.continuous)
    cores = common.available_cores()
    args.workers = args.workers or cores
    compile_s, gradient_step_us, gae_s = time_parts(args, config)
    sb3 = make_sb3(args)
    first_rows, rows, bare, sb3_runs = [], [], [], {threads: [] for threads in {1, cores}}
    ends = []
    with common.Workers(cores, config, 0, cores) as workers:
        for _ in range(args.rounds):
            first_row, after = run_ours(args, args.rollouts)
            first_rows.append(first_row)
            rows += after
            ends.append(statistics.harmonic_mean([row["steps_per_s"] for row in after]))
            workers.start(step_bare, args.num_steps * 10)
            bare.append(sum(workers.results()))
            for threads, runs in sb3_runs.items():
                runs.append(run_sb3(sb3, threads))
    _, evaluated = run_ours(args, args.rollouts, eval_every=25_000)
    best = max(sb3_runs.values(), key=lambda runs: statistics.median(speed for speed, _ in runs))
    ours = statistics.median(ends)
    theirs, theirs_us = (spread(column) for column in zip(*best, strict=True))
    batch_size, bare_speed = args.num_envs * args.num_steps, statistics.median(bare)
    waited = sum(row["eval_s"] for row in evaluated)
    total = sum(row[k] for row in evaluated for k in ("rollout_s", "update_s", "eval_s"))
    budget = 2_000_000 if config["actor"] == "categorical" else 1_000_000
    return {
        "this PPO, steps/s": spread(ends),
        "Stable-Baselines3, steps/s": theirs,
        f"bare stepping on {cores} cores, steps/s": spread(bare),
        "this PPO / Stable-Baselines3": ours / theirs[0],
        "this PPO / bare stepping": ours / bare_speed,
        "rollout / bare stepping": batch_size / statistics.median(row["rollout_s"] for row in rows) / bare_speed,
        "rollout, s": spread([row["rollout_s"] for row in rows]),
        "update, s": spread([row["update_s"] for row in rows]),
        "  of it values, log-probabilities and GAE, s": gae_s,
        "waiting for evaluations, share": waited / total,
        "gradient step, us": gradient_step_us,
        "Stable-Baselines3's gradient step, us": theirs_us,
        "gradient step, times faster": theirs_us[0] / gradient_step_us,
        "compile, s": compile_s,
        "start to the first row of metrics.csv, s": spread(first_rows),
        f"a whole run of {budget:,} steps without evaluation, minutes": (statistics.median(first_rows) + budget / ours)
        / 60,
    }


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0])
    count = common.number(int, 1)
    parser.add_argument("--env-id", default="LunarLander-v3", help="[LunarLander-v3]")
    parser.add_argument("--continuous", action="store_true", help="the variant with continuous actions")
    parser.add_argument("--workers", type=count, metavar="INT", help="rollout processes [one per core]")
    parser.add_argument("--num-envs", type=count, default=16, metavar="INT", help="[16]")
    parser.add_argument("--num-steps", type=count, default=1024, metavar="INT", help="[1024]")
    parser.add_argument("--rounds", type=count, default=3, metavar="INT", help="turns of each of the three [3]")
    parser.add_argument("--rollouts", type=common.number(int, 3), default=12, metavar="INT", help="a turn of ours [12]")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="[on]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.num_envs * args.num_steps < 64:
        parser.error("a rollout is smaller than a minibatch of 64")
    return args


def main(argv=None):
    def script():
        args = parse_args(argv)
        found = bench(args)
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
