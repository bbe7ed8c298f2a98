"""Deterministic against sampled actions: every final policy below a folder on the same held-out seeds, both ways.

    python eval_stochastic.py runs/                  # every run below runs/
    python eval_stochastic.py runs/ppo_LunarLander-v3_s0
    python eval_stochastic.py runs/ --episodes 200   # more of the held-out seeds; the first 50 stay the same

Page section 7: with a state-independent sigma that stays near 1, the sampled policy is another controller than the
deterministic one, and the training return is the sampled one's. It repeats exactly: an episode's noise is its seed's.
"""

import argparse
import sys
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
def at_the_start(actor, config, seeds):
    """At the first observations of the episodes from these seeds: mean entropy, nats, and mean sigma or None."""
    env = common.make_policys_env(config)
    starts = np.array([common.flat_observation(env.reset(seed=int(seed))[0], env.observation_space) for seed in seeds])
    env.close()
    obs = torch.from_numpy(starts)
    return {
        "start_entropy": float(actor(obs).entropy().mean()),
        "action_std": common.mean_std(actor, obs) if config["actor"] == "gaussian" else None,
    }


def compare(name, actor, config, seeds, episodes):
    """A run's row, {field: value} over FIELDS. episodes: {"deterministic": as from common.evaluate, "sampled": ...}."""
    row = {"run": name, "episodes": len(seeds)}
    for way, played in episodes.items():
        found = common.summarise(played, config)
        row |= {f"{way}_mean": found["mean_return"], f"{way}_std": found["std_return"]}
        row |= {f"{way}_solved": found["solved"], f"{way}_truncated": found["truncated"]}
    difference = paired_interval(episodes["deterministic"]["return"] - episodes["sampled"]["return"])
    row |= dict(zip(("difference", "difference_low", "difference_high"), difference, strict=True))
    return row | at_the_start(actor, config, seeds)


def load_policies(runs):
    """({name: (actor, config)} of the runs {name: folder}, [why a run's environment is not there]).

    Raises UsageError for a policy that cannot be used, and where no run's environment is installed.
    """
    policies, passed_over = {}, []
    for name, folder in runs.items():
        try:
            policies[name] = common.load_runs_policy(folder, "final.pt")
        except common.NotInstalledError as error:
            passed_over.append(str(error))
    if not policies:
        raise common.UsageError(passed_over[0])
    return policies, passed_over


def evaluate_runs(runs, policies, seeds, num_workers):
    """The rows of the policies, {name: (actor, config)}, in their order. runs: {name: folder}."""
    tasks, rows = {}, {}
    for name, (_, config) in policies.items():
        tasks.setdefault(str(config), []).append(name)
    with tqdm(total=len(policies), unit=" runs", disable=not sys.stderr.isatty(), leave=False) as progress:
        for names in tasks.values():  # those with one config share their workers
            with common.Workers(num_workers, policies[names[0]][1], 0, num_workers) as workers:
                for name in names:
                    actor, config = policies[name]
                    weights, episodes = common.actor_weights(actor), {}
                    with common.playing(runs[name] / "final.pt"):
                        for way in ("deterministic", "sampled"):
                            episodes[way] = common.evaluate_with(workers, weights, seeds, way == "deterministic")
                    rows[name] = compare(name, actor, config, seeds, episodes)
                    progress.update()
    return [rows[name] for name in policies]


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
        description="Play each run's final policy on held-out seeds twice, with the deterministic and with sampled "
        f"actions, print a table and write it as {CSV_NAME} into the folder given.",
    )
    parser.add_argument("folder", type=Path, help="a run, or a folder with runs below it")
    parser.add_argument(
        "--episodes",
        type=common.number(int, 1, 1_000_000),
        default=len(common.FINAL_SEEDS),
        metavar="INT",
        help=f"how many held-out seeds [{len(common.FINAL_SEEDS)}, those of a run's own final evaluation]",
    )
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
    finished = {name: folder for name, folder in runs.items() if (folder / "final.pt").exists()}
    if not finished:
        raise common.UsageError(f"there is no finished run at or below {root}")
    common.check_writable(root / CSV_NAME)
    seeds = [common.FINAL_SEEDS[0] + i for i in range(args.episodes)]
    policies, passed_over = load_policies(finished)
    rows = evaluate_runs(finished, policies, seeds, args.workers or common.available_cores())
    common.write_atomically(root / CSV_NAME, common.csv_text(FIELDS, rows).encode())
    print("\n".join(table(rows)))
    print(f"written to {root / CSV_NAME}")
    for why in passed_over:
        print(f"passed over: {why}", file=sys.stderr)
    without = [folder for name, folder in runs.items() if name not in finished]
    if without:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        print(f"passed over: no final policy in {without[0]}{more}", file=sys.stderr)


def main(argv=None):
    return common.run_script("eval_stochastic.py", lambda: run(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
