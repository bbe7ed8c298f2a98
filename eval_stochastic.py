"""Deterministic against sampled actions: every final policy below a folder on the same 50 held-out seeds, both ways.

    python eval_stochastic.py runs/                  # every run below runs/
    python eval_stochastic.py runs/ppo_LunarLander-v3_s0

Page section 7: with a state-independent sigma that stays near 1, the sampled policy is another controller than the
deterministic one, and the training return is the sampled one's. It repeats exactly: an episode's noise is its seed's.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from tqdm import tqdm

import common

FIELDS = (
    *("run", "episodes", "deterministic_mean", "deterministic_std", "sampled_mean", "sampled_std"),
    *("difference", "difference_low", "difference_high"),
    *("deterministic_solved", "sampled_solved", "deterministic_truncated", "sampled_truncated"),
    *("start_entropy", "action_std"),
)
CSV_NAME = "eval_stochastic.csv"


def paired_interval(differences, level=0.95):
    """(mean, low, high) of paired differences, [n], by Student's t; the bounds are NaN for n = 1."""
    differences = np.asarray(differences, dtype=np.float64)
    mean = differences.mean()
    if len(differences) < 2:
        return float(mean), float("nan"), float("nan")
    margin = stats.t.ppf((1 + level) / 2, len(differences) - 1) * stats.sem(differences)
    return float(mean), float(mean - margin), float(mean + margin)


@torch.inference_mode()
def start_entropy(actor, config, seeds):
    """Mean entropy of the policy, nats, at the first observations of the episodes from these seeds."""
    env = common.make_policys_env(config)
    starts = np.array([common.flat_observation(env.reset(seed=int(seed))[0], env.observation_space) for seed in seeds])
    env.close()
    return float(actor(torch.from_numpy(starts)).entropy().mean())


def compare(name, actor, config, episodes):
    """A run's row, {field: value} over FIELDS. episodes: {"deterministic": as from common.evaluate, "sampled": ...}."""
    row = {"run": name, "episodes": len(common.FINAL_SEEDS)}
    for way, played in episodes.items():
        found = common.summarise(played, config)
        row |= {f"{way}_mean": found["mean_return"], f"{way}_std": found["std_return"]}
        row |= {f"{way}_solved": found["solved"], f"{way}_truncated": found["truncated"]}
    difference = paired_interval(episodes["deterministic"]["return"] - episodes["sampled"]["return"])
    row |= dict(zip(("difference", "difference_low", "difference_high"), difference, strict=True))
    row["start_entropy"] = start_entropy(actor, config, common.FINAL_SEEDS)
    row["action_std"] = float(actor.log_std.detach().exp().mean()) if config["actor"] == "gaussian" else None
    return row


def evaluate_runs(runs, num_workers):
    """The rows of the runs {name: folder}, in their order."""
    rows, pools = [], {}
    with ExitStack() as stack:
        for name, folder in tqdm(runs.items(), unit=" runs", disable=not sys.stderr.isatty(), leave=False):
            actor, config = common.load_policy(folder / "final.pt")
            if str(config) not in pools:
                pools[str(config)] = stack.enter_context(common.Workers(num_workers, config, 0, num_workers))
            workers, weights, episodes = pools[str(config)], common.actor_weights(actor), {}
            for way in ("deterministic", "sampled"):
                deterministic = way == "deterministic"
                episodes[way] = common.evaluate_with(workers, weights, common.FINAL_SEEDS, deterministic)
            rows.append(compare(name, actor, config, episodes))
    return rows


def table(rows):
    """The rows as lines of text."""

    def percent(value):
        return "-" if value != value else f"{value:.0%}"

    def number(value, digits):
        return "-" if value is None or value != value else f"{value:.{digits}f}"

    yield f"{'run':<40} {'deterministic':>17} {'sampled':>17} {'difference, 95 % interval':>28} "\
          f"{'solved':>11} {'timed out':>11} {'entropy':>8} {'sigma':>6}"  # fmt: skip
    for row in rows:
        cells = [f"{row['run']:<40}"]
        cells += [
            f"{number(row[w + '_mean'], 1):>8} +- {number(row[w + '_std'], 1):>5}" for w in ("deterministic", "sampled")
        ]
        low, high = number(row["difference_low"], 1), number(row["difference_high"], 1)
        cells.append(f"{number(row['difference'], 1):>9} {f'({low} to {high})':>18}")
        for share in ("solved", "truncated"):
            both = f"{percent(row[f'deterministic_{share}'])} / {percent(row[f'sampled_{share}'])}"
            cells.append(f"{both:>11}")
        yield " ".join([*cells, f"{number(row['start_entropy'], 2):>8}", f"{number(row['action_std'], 2):>6}"])
    yield ""
    yield "+-: standard deviation over episodes; shares: deterministic / sampled; entropy: nats, at the start states"


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="eval_stochastic.py",
        description="Play each run's final policy on 50 held-out seeds twice, with the deterministic and with sampled "
        f"actions, print a table and write it as {CSV_NAME} into the folder given.",
    )
    parser.add_argument("folder", type=Path, help="a run, or a folder with runs below it")
    parser.add_argument(
        "--workers",
        type=common.number(int, 1),
        metavar="INT",
        help="processes; any number gives the same [one per core]",
    )
    return parser.parse_args(argv)


def run(args):
    torch.set_num_threads(1)
    root = args.folder
    runs = {str(run.relative_to(root)) if run != root else run.resolve().name: run for run in common.find_runs(root)}
    for folder in runs.values():
        if not (folder / "final.pt").exists():
            print(f"{folder} has no final policy yet", file=sys.stderr)
    runs = {name: folder for name, folder in runs.items() if (folder / "final.pt").exists()}
    if not runs:
        raise common.UsageError(f"there is no finished run at or below {root}")
    rows = evaluate_runs(runs, args.workers or common.available_cores())
    common.write_atomically(root / CSV_NAME, common.csv_text(FIELDS, rows).encode())
    print("\n".join(table(rows)))
    print(f"written to {root / CSV_NAME}")


def main(argv=None):
    return common.run_script("eval_stochastic.py", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
