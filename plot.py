"""Every figure, and the results table, from run folders alone.

    python plot.py runs/                         # figures/<folder of the runs>/*.png
    python plot.py runs/reference --table        # the results table as Markdown, beside the page's numbers
    python plot.py runs/tasks --env-id Hopper-v5

Runs that stand in one folder belong together, and are told apart by their config.json: ours, Stable-Baselines3's
(sb3_reference.py), each action space. Where they differ in more than the seed, as in runs/sigma, the settings are
compared; where they are of several environments, as in runs/tasks, the environments. A figure whose runs are not there
is left out, and said to be.
"""

import argparse
import copy
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.distributions import kl_divergence

import common
import ppo
from eval_stochastic import CSV_NAME, FIELDS

# Okabe and Ito's colours, told apart by the colour-blind and in grey print
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
NAMES = {"ppo": "this PPO", "sb3-ppo": "Stable-Baselines3", "sb3-a2c": "SB3's A2C", "sb3-trpo": "SB3's TRPO"}
COLOURS = {"ppo": BLUE, "sb3-ppo": ORANGE, "sb3-a2c": GREEN, "sb3-trpo": PURPLE}
SPACES = {False: "discrete", True: "continuous"}
MILLION = 1e6
plt.rcParams.update({
    "figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 8, "axes.titlesize": 9.5,
    "figure.constrained_layout.use": True,
})  # fmt: skip

# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


class LoadedRun:
    """A run folder's rows as arrays of floats, NaN where a cell is empty; as far as an unfinished run goes."""

    def __init__(self, path):
        config = common.run_config(path)
        self.path, self.args, self.versions = path, config["args"], config["versions"]
        self.config = common.SINCE_ADDED | config["policy"]
        self.seed, self.env_id = self.args["seed"], self.args["env_id"]
        self.kind = f"sb3-{self.args['algo']}" if "algo" in self.args else "ppo"
        self.continuous, self.solved_return = self.config["actor"] == "gaussian", self.config["solved_return"]
        self.metrics, self.evals = columns(path / "metrics.csv"), columns(path / "evals.csv")
        self.result = common.run_result(path)


def columns(path):
    """A run's CSV file of numbers as {field: array}, with env_steps among them; {} where there is none."""
    rows = common.read_csv(path) if path.exists() else []
    if not rows:
        return {}
    found = {field: np.array([number(row[field], path) for row in rows]) for field in rows[0]}
    if "env_steps" not in found or not (np.diff(found["env_steps"], prepend=-1) > 0).all():
        raise common.UsageError(f"{path} cannot be read: env_steps is not a column that rises")
    return found


def number(text, path):
    """A cell of a CSV file as a float, NaN where it is empty."""
    try:
        value = float(text or "nan")
    except ValueError:
        value = float("inf")
    if abs(value) > common.LARGEST:
        raise common.UsageError(f"{path} cannot be read: {text!r} is not a number here")
    return value


def load_runs(root, env_id=None):
    """{folder: {(env_id, kind, continuous): runs by seed}} of all runs at or below root, or of one environment's."""
    folders = defaultdict(lambda: defaultdict(list))
    for path in common.find_runs(root):
        run = LoadedRun(path)
        if env_id in (None, run.env_id):
            folders[path.resolve().parent][run.env_id, run.kind, run.continuous].append(run)
    if not folders:
        raise common.UsageError(f"there is no run{f' of {env_id}' if env_id else ''} at or below {root}")
    return {
        folder: {key: sorted(runs, key=lambda run: run.seed) for key, runs in sorted(groups.items())}
        for folder, groups in folders.items()
    }


NO_SETTING = ("seed", "algo", "eval_every", "compile", *common.MACHINE_ARGS)  # arguments that make no other setting
ONLY_WITH = {"kl_beta": "kl-fixed", "kl_target": "kl-adaptive"}  # the objective that an argument tells apart


def settings(runs):
    """{flags in which they differ from the others and from the defaults: runs}; "default" where there are none."""
    defaults, labels = vars(ppo.parse_args([])), defaultdict(list)

    def value(run, name):
        return run.args.get(name, defaults[name])

    names = [name for name in defaults if name not in NO_SETTING]
    varying = {name for name in names if len({repr(value(run, name)) for run in runs}) > 1}
    for run in runs:
        words = []
        for name in names:
            if name in ONLY_WITH:
                shown = "objective" in varying and value(run, "objective") == ONLY_WITH[name]
            else:
                shown = name in varying and value(run, name) != defaults[name]
            if shown:
                words.append(flag(name, value(run, name)))
        labels[" ".join(words) or "default"].append(run)
    return dict(sorted(labels.items(), key=lambda item: (item[0] != "default", natural(item[0]))))


def flag(name, value):
    """An argument as on the command line: --norm-obs, --no-norm-adv, --clip-eps 0.1."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name}"
    words = value if isinstance(value, list) else [value]
    return " ".join([f"--{name}", *(f"{word:g}" if isinstance(word, (int, float)) else str(word) for word in words)])


def natural(text):
    """A key that sorts numbers in a text by their size."""
    return [(1, word, 0) if not word.replace(".", "", 1).isdigit() else (0, "", float(word)) for word in text.split()]


def studies(groups):
    """{(env_id, continuous): our runs by setting} where those of any environment differ; else {}."""
    found = {(env_id, c): settings(runs) for (env_id, kind, c), runs in groups.items() if kind == "ppo"}
    return found if any(len(by_setting) > 1 for by_setting in found.values()) else {}


def in_words(env_id, continuous):
    return f"{env_id}, {SPACES[continuous]} actions"


def tasks(groups):
    """{environment, and its action space where runs of both are there: (our runs, Stable-Baselines3's PPO's)}."""
    found, keys = {}, sorted({(env_id, continuous) for env_id, _, continuous in groups})
    for env_id, continuous in keys:
        name = in_words(env_id, continuous) if (env_id, not continuous) in keys else env_id
        found[name] = tuple(groups.get((env_id, kind, continuous), []) for kind in ("ppo", "sb3-ppo"))
    return found


# ---------------------------------------------------------------------------------------------
# Estimates
# ---------------------------------------------------------------------------------------------


def bootstrap(values, level=0.95, resamples=2000):
    """Percentile bootstrap interval of the mean over seeds. values: [seeds, ...] -> (low, high), each [...]."""
    values = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    means = values[picks].mean(axis=1)
    return tuple(np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0))


def together(runs, table, field):
    """Where every run has a row and a value: (env_steps [x], values [seeds, x]). Nothing is filled in."""
    parts = [getattr(run, table) for run in runs]
    if not runs or not all(field in part for part in parts):
        return np.array([]), np.empty((len(runs), 0))
    steps = parts[0]["env_steps"]
    for part in parts[1:]:
        steps = np.intersect1d(steps, part["env_steps"])
    values = np.array([part[field][np.isin(part["env_steps"], steps)] for part in parts])
    whole = np.isfinite(values).all(axis=0)
    return steps[whole], values[:, whole]


# ---------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------


def draw(axis, runs, table, field, colour, label, style="-"):
    """Every seed thin as far as it goes; where all are there, their mean and, from two seeds, its 95 % band."""
    for run in runs:
        if field in getattr(run, table):
            part = getattr(run, table)
            axis.plot(part["env_steps"] / MILLION, part[field], style, color=colour, lw=0.5, alpha=0.35)
    steps, values = together(runs, table, field)
    if values.size:
        axis.plot(steps / MILLION, values.mean(axis=0), style, color=colour, lw=1.6, label=label)
        if len(values) > 1:
            axis.fill_between(steps / MILLION, *bootstrap(values), color=colour, alpha=0.2, lw=0)


def frame(axis, runs, table, field):
    """Limits that fit the runs' returns, with a dotted line where they count as solved; or a word that there are none.

    The lowest 1 % may fall below: LunarLander's first crashes would flatten all that comes after them.
    """
    returns = [value for run in runs for value in getattr(run, table).get(field, []) if np.isfinite(value)]
    if not returns:
        axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center")
        return
    low, high = np.quantile(returns, [0.01, 1], method="lower")
    solved = runs[0].solved_return
    if solved is not None:
        axis.axhline(solved, color=GREY, lw=0.8, ls=":", label="solved")
        low, high = min(low, solved), max(high, solved)
    margin = 0.05 * (high - low) or 1
    axis.set_ylim(low - margin, high + margin)


def legend_below(figure, axes):
    """One legend for all these axes, where it covers no line whatever the runs are like."""
    named = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)


def seeds(runs):
    return f"{len(runs)} seed{'s' * (len(runs) > 1)}"


def figure_clip():
    """Page section 2.1: the per-sample objective against the ratio."""
    ratio, eps = torch.linspace(0, 2, 401), 0.2
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 2.9), sharex=True)
    for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
        objective = ppo.clipped_surrogate(ratio, torch.full_like(ratio, advantage), eps)
        axis.plot(ratio, ratio * advantage, "--", color=GREY, lw=1.2, label="$r A$, unclipped")
        axis.plot(ratio, objective, color=BLUE, lw=2.2, label="$L^{CLIP}$, eq. (4)")
        flat = ratio > 1 + eps if advantage > 0 else ratio < 1 - eps
        axis.axvspan(
            ratio[flat].min().item(), ratio[flat].max().item(), color=ORANGE, alpha=0.12, lw=0, label="gradient 0"
        )
        axis.axvline(1, color=GREY, lw=0.8)
        axis.plot([1], [advantage], "o", color=BLUE, ms=5)
        axis.set(title=f"advantage $A = {advantage:+.0f}$", xlabel=r"ratio $r = \pi_\theta / \pi_{old}$", xlim=(0, 2))
        axis.set_xticks([0, 1 - eps, 1, 1 + eps, 2], ["0", r"$1-\epsilon$", "1", r"$1+\epsilon$", "2"])
        axis.legend(loc="upper left" if advantage > 0 else "lower left")
    axes[0].set_ylabel("objective of one sample")
    return figure


def figure_curves(ours, sb3, space):
    """All that a run logs, against environment steps."""
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 5.8), sharex=True)
    panels = (
        ("train_return_100", "metrics", "training return\n(sampled actions, last 100 episodes)", "return"),
        ("mean_return", "evals", "deterministic evaluation\n(10 held-out starts)", "return"),
        (None, "metrics", "KL between old and new policy", "nats"),
        ("clip_frac", "metrics", r"clip fraction, $|r - 1| > \epsilon$", "share of samples"),
        ("entropy", "metrics", "entropy of the policy", "nats"),
        ("explained_variance", "metrics", "explained variance of the critic", "share of variance"),
    )
    for axis, (field, table, title, unit) in zip(axes.flat, panels, strict=True):
        axis.set(title=title, ylabel=unit)
        if field is None:
            for name, label, colour, style in (
                ("approx_kl", "$k_3$, eq. (6)", BLUE, "-"),
                ("kl_k1", "$k_1$", GREEN, "--"),
                ("kl_k2", "$k_2$", PURPLE, ":"),
                ("exact_kl", "exact, after the update", GREY, "-"),
            ):
                draw(axis, ours, "metrics", name, colour, label, style)
            draw(axis, sb3, "metrics", "exact_kl", ORANGE, "exact, SB3's")
            axis.set_ylim(0, 1.4 * axis.get_ylim()[1])  # room for the legend
            axis.legend(*axis.get_legend_handles_labels(), ncols=2, loc="upper center", handlelength=1.5)
            continue
        draw(axis, sb3, table, field, ORANGE, f"Stable-Baselines3, {seeds(sb3)}")
        draw(axis, ours, table, field, BLUE, f"this PPO, {seeds(ours)}")
        if unit == "return":
            frame(axis, ours + sb3, table, field)
    legend_below(figure, axes[0, :2])
    for axis in axes[1]:
        axis.set_xlabel("environment steps, millions")
    figure.suptitle(f"{ours[0].env_id}, {space} actions: mean over seeds with 95 % bootstrap band; each seed thin")
    return figure


def figure_against_sb3(groups, env_id):
    """Deterministic evaluations of ours and of every Stable-Baselines3 algorithm there is."""
    present = [c for c in (False, True) if (env_id, "ppo", c) in groups]
    figure, axes = plt.subplots(1, len(present), figsize=(4.6 * len(present) + 0.6, 3.7), squeeze=False)
    for axis, continuous in zip(axes[0], present, strict=True):
        every = []
        for kind in reversed(NAMES):
            runs = groups.get((env_id, kind, continuous), [])
            draw(axis, runs, "evals", "mean_return", COLOURS[kind], f"{NAMES[kind]}, {seeds(runs)}")
            every += runs
        frame(axis, every, "evals", "mean_return")
        axis.set(title=in_words(env_id, continuous), xlabel="environment steps, millions")
    legend_below(figure, axes[0])
    axes[0, 0].set_ylabel("return of the deterministic policy\non 10 held-out starts")
    return figure


def figure_tasks(groups):
    """Deterministic evaluations of ours and of Stable-Baselines3's PPO, a panel for each environment."""
    found = tasks(groups)
    columns = min(len(found), 3)
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.5 * columns, 2.7 * rows + 0.6), squeeze=False)
    for axis, (name, (ours, sb3)) in zip(axes.flat, found.items(), strict=False):
        draw(axis, sb3, "evals", "mean_return", COLOURS["sb3-ppo"], NAMES["sb3-ppo"], "--")
        draw(axis, ours, "evals", "mean_return", COLOURS["ppo"], NAMES["ppo"])
        frame(axis, ours + sb3, "evals", "mean_return")
        axis.set(title=name, xlabel="environment steps, millions")
    for axis in axes.flat[len(found) :]:
        axis.remove()
    legend_below(figure, figure.axes)
    for axis in axes[:, 0]:
        axis.set_ylabel("return on 10 held-out starts")
    figure.suptitle("Deterministic evaluations: mean over seeds with 95 % bootstrap band; each seed thin")
    return figure


def figure_settings(by_setting, stochastic, title):
    """What each setting comes to: its seeds, their mean and 95 % bootstrap interval; grey: that of the first."""
    found = {label: measures(runs, stochastic) for label, runs in by_setting.items()}
    panels = (
        (("deterministic", "sampled"), "return"),
        (("exact_kl",), "exact KL of an update, nats\n(median)"),
        (("clip_frac",), "clip fraction\n(median)"),
        (("explained_variance",), "explained variance\n(last tenth)"),
        (("entropy",), "entropy, nats\n(at the end)"),
    )
    size = (11.5, 0.36 * len(found) + 1.6)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, width_ratios=(2, 1, 1, 1, 1))
    for axis, (names, xlabel) in zip(axes, panels, strict=True):
        axis.set(xlabel=xlabel)
        for name, colour, marker, offset in zip(names, (BLUE, ORANGE), "os", (-0.12, 0.12), strict=False):
            for row, values in enumerate(measured[name] for measured in found.values()):
                if not values:
                    continue
                low, high = bootstrap(values) if len(values) > 1 else (values[0], values[0])
                if row == 0:
                    axis.axvspan(low, high, color=colour if len(names) > 1 else GREY, alpha=0.15, lw=0)
                y = row + (offset if len(names) > 1 else 0)
                axis.plot([low, high], [y, y], color=colour, lw=2)
                axis.plot(values, [y] * len(values), marker, color=colour, ms=3, alpha=0.4, mew=0)
                axis.plot(np.mean(values), y, marker, color=colour, ms=6, label=f"{name} actions" if row == 0 else None)
    kl = [x for measured in found.values() for x in measured["exact_kl"] if x > 0]
    if kl and max(kl) > 10 * min(kl):
        axes[1].set_xscale("log")
    axes[0].set_yticks(range(len(found)), found, family="monospace", fontsize=8)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(title)
    return figure


def measures(runs, stochastic):
    """A setting's figures, {name: values of its finished runs}. stochastic: from `read_stochastic`.

    "sampled" is on held-out starts where eval_stochastic.py has played them all, else over the last 100 episodes of
    training, as the paper takes it.
    """
    runs = [run for run in runs if run.result]
    rows = [stochastic[run.path.resolve()] for run in runs if run.path.resolve() in stochastic]
    summaries = [run.result["diagnostics"] for run in runs]
    found = {
        "deterministic": [run.result["final"]["mean_return"] for run in runs],
        "training": [s["train_return_last"] for s in summaries],
        "exact_kl": [float(np.nanmedian(run.metrics["exact_kl"])) for run in runs],
        "clip_frac": [s["clip_frac_median"] for s in summaries],
        "explained_variance": [s["explained_variance_end"] for s in summaries],
        "entropy": [s["entropy_last"] for s in summaries],
    }
    found["sampled"] = [row["sampled_mean"] for row in rows] if len(rows) == len(runs) else found["training"]
    return {name: [x for x in values if x is not None and x == x] for name, values in found.items()}


def figure_stochastic(rows, env_runs):
    """Deterministic against sampled return of each of our final policies. rows: of eval_stochastic.csv."""
    by_space = {c: [row for row in rows if row["continuous"] == c] for c in (False, True)}
    present = [c for c in by_space if by_space[c]]
    figure, axes = plt.subplots(1, len(present), figsize=(3.4 * len(present) + 0.6, 3.5), squeeze=False, sharey=True)
    for axis, continuous in zip(axes[0], present, strict=True):
        for way, offset, colour, marker in (("deterministic", -0.12, BLUE, "o"), ("sampled", 0.12, ORANGE, "s")):
            x = [row["seed"] + offset for row in by_space[continuous]]
            mean = [row[f"{way}_mean"] for row in by_space[continuous]]
            error = [row[f"{way}_std"] for row in by_space[continuous]]
            axis.errorbar(x, mean, error, fmt=marker, color=colour, ms=5, lw=1, capsize=2, label=way)
        if env_runs[0].solved_return is not None:
            axis.axhline(env_runs[0].solved_return, color=GREY, lw=0.8, ls=":", label="solved")
        axis.set(title=f"{SPACES[continuous]} actions", xlabel="seed of the run")
        axis.set_xticks(sorted({row["seed"] for row in by_space[continuous]}))
    starts = span([int(row["episodes"]) for row in rows], 0)
    axes[0, 0].set_ylabel(f"return on {starts} held-out starts\n(mean and standard deviation of episodes)")
    legend_below(figure, axes[0, :1])
    return figure


@torch.inference_mode()
def estimator_errors(old, new, obs, fractions):
    """k1, k2, k3 against the exact KL between old and the policies on the way from old to new, on states obs [n, d].

    Returns, for each fraction of the way: exact KL [x]; bias [x, 3], mean estimate less exact; spread [x, 3], standard
    deviation of one sample's estimate; and the standard error of the bias [x, 3].
    """
    dist_old, mixed = old(obs), copy.deepcopy(old)
    actions = old.sample(obs, torch.from_numpy(old.noise(np.random.default_rng(0), len(obs))))
    logp_old, exact, estimates = dist_old.log_prob(actions), [], []
    states = [policy.state_dict().values() for policy in (mixed, old, new)]  # with a Normaliser's buffers
    for fraction in fractions:
        for value, start, end in zip(*states, strict=True):
            value.copy_(start.lerp(end, fraction))
        dist = mixed(obs)
        exact.append(kl_divergence(dist_old, dist).double())
        estimates.append(torch.stack(ppo.kl_estimates((dist.log_prob(actions) - logp_old).double())))
    exact, estimates = torch.stack(exact), torch.stack(estimates)  # [x, n], [x, 3, n]
    error = estimates - exact[:, None]
    return exact.mean(-1), error.mean(-1), estimates.std(-1), error.std(-1) / len(obs) ** 0.5


def estimators_of(run):
    """`estimator_errors` from a run's policy at 50 % of training to that at 100 %, on states of five held-out episodes.

    Only where there is a KL between them; None where there is none anywhere, or no such snapshots.
    """
    names = ("snapshots/050.0.pt", "snapshots/100.0.pt")
    if not all((run.path / name).exists() for name in names):
        return None
    (old, config), (new, _) = (common.load_runs_policy(run.path, name) for name in names)
    env, numpy_old = common.make_policys_env(config), common.as_numpy(old)
    obs = [obs for seed in common.FINAL_SEEDS[:5] for obs, *_ in common.play(numpy_old, env, seed, False)]
    env.close()
    obs = torch.from_numpy(np.array(obs)).repeat(10, 1)
    found = estimator_errors(old, new, obs, torch.logspace(-2.5, 0, 16).tolist())
    apart = found[0] > 0
    return [values[apart] for values in found] if apart.any() else None


def figure_estimators(errors_by_space):
    """Bias and spread of k1, k2, k3 (page section 4.1), from `estimators_of` each median run."""
    figure, axes = plt.subplots(2, len(errors_by_space), figsize=(3.9 * len(errors_by_space) + 0.8, 5.4), squeeze=False)
    for (over, under), (space, (exact, bias, spread, error)) in zip(axes.T, errors_by_space.items(), strict=True):
        for k, (colour, style) in enumerate(((GREEN, "--"), (PURPLE, ":"), (BLUE, "-"))):
            relative, margin = bias[:, k] / exact, 1.96 * error[:, k] / exact
            over.plot(exact, relative, style, color=colour, lw=1.6, label=f"$k_{k + 1}$")
            over.fill_between(exact, relative - margin, relative + margin, color=colour, alpha=0.15, lw=0)
            under.plot(exact, spread[:, k], style, color=colour, lw=1.6)
        under.plot(exact, exact, color=GREY, lw=0.8, label="the KL itself")
        over.set(title=f"{space} actions", xscale="log", ylim=(-0.75, 0.75))
        under.set(xscale="log", yscale="log", xlabel="exact KL, nats")
    axes[0, 0].set_ylabel("bias, as a share of the KL")
    axes[1, 0].set_ylabel("standard deviation\nof one sample's estimate, nats")
    axes[0, 0].legend()
    axes[1, 0].legend()
    return figure


def figure_progression(run, starts):
    """Paths of the lander from the same starts with each snapshot (page section 6.3)."""
    snapshots = common.load_snapshots(run.path)
    size = (2 * len(snapshots), 3.3)
    figure, ((*axes,),) = plt.subplots(1, len(snapshots), figsize=size, sharex=True, sharey=True, squeeze=False)
    for axis, (percentage, (actor, config)) in zip(axes, snapshots.items(), strict=True):
        numpy_actor, env = common.as_numpy(actor), common.make_policys_env(config)
        episodes = []
        for seed in starts:
            steps = list(common.play(numpy_actor, env, seed))
            episodes.append(common.score(steps, lander=True))
            flown, landed = np.array([obs[:2] for obs, *_ in steps]), episodes[-1]["landed"]
            axis.plot(*flown.T, color=BLUE if landed else ORANGE, lw=0.7, alpha=0.8, ls="-" if landed else "--")
        env.close()
        found = common.summarise({k: np.array([e[k] for e in episodes]) for k in common.EPISODE_FIELDS}, config)
        axis.set(xlim=(-1.1, 1.1), ylim=(-0.1, 1.7), xlabel="sideways", title=f"{percentage:g} % of training")
        axis.text(
            0.5, -0.3, f"return {found['mean_return']:.0f}, landed {found['landed']:.0%}\n"
            f"fuel {found['mean_fuel']:.0f}, {found['mean_length']:.0f} steps",
            transform=axis.transAxes, ha="center", va="top", fontsize=8,
        )  # fmt: skip
    axes[0].set_ylabel("height (1.4: the start)")
    axes[0].plot([], [], color=BLUE, label="lands")
    axes[0].plot([], [], color=ORANGE, ls="--", label="does not land")
    axes[0].legend(loc="lower left", frameon=True)
    figure.suptitle(f"{run.env_id}, seed {run.seed}: the same {len(starts)} held-out starts, deterministic actions")
    return figure


# ---------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------

PAGE = {  # the page's numbers, sections 3.5, 6, 6.1 and 7: {row: (discrete, continuous)}
    "final": ("275.9 ± 2.5", "265.0 ± 2.9"),
    "solved": ("99.6 %", "100 %"),
    "best": ("275.7 ± 2.6", ""),
    "first": ("612,762", "419,430"),
    "kl": ("0.0036 to 0.0043; 0.0101", "; 0.0052 to 0.0064"),
    "clip": ("0.038 to 0.045; 0.121", "0.041 to 0.045"),
    "ev": ("0.94 to 0.99", "0.97 to 0.99"),
    "entropy": ("1.38 → 0.60 to 0.69", "2.85 → 2.51 to 2.86"),
    "sampled": ("269 to 279", "144 to 156"),
    "timeouts": ("", "90 to 100 %"),
    "start_entropy": ("0.27 to 0.44", ""),
    "decision": ("92", "99"),
    "minutes": ("15.8", "8.5"),
}
PAGE_SB3 = "274.0 ± 0.6"


def summary(values, digits=1, interval=True):
    """mean ± standard deviation over seeds [95 % interval of the mean]."""
    values = np.array([value for value in values if value is not None and value == value], dtype=np.float64)
    if not len(values):
        return ""
    text = f"{values.mean():,.{digits}f}"
    if len(values) > 1:
        text += f" ± {values.std(ddof=1):,.{digits}f}"
        if interval:
            text += " [{:,.{d}f}, {:,.{d}f}]".format(*bootstrap(values), d=digits)
    return text


def span(values, digits):
    """smallest to largest."""
    values = [value for value in values if value is not None and value == value]
    if not values:
        return ""
    low, high = f"{min(values):z,.{digits}f}", f"{max(values):z,.{digits}f}"
    return low if low == high else f"{low} to {high}"


def percent(shares):
    """Mean of shares, as on the page: 99.6 %, 100 %."""
    shares = [share for share in shares if share is not None]
    return f"{100 * np.mean(shares):.1f} %".replace(".0 %", " %") if shares else ""


def results_table(groups, env_id, stochastic):
    """The Markdown table's lines: page (where it is the page's task), ours, SB3's. stochastic: of `read_stochastic`."""

    def column(kind, continuous):
        runs = [run for run in groups.get((env_id, kind, continuous), []) if run.result]
        results = [run.result for run in runs]
        both = [stochastic[run.path.resolve()] for run in runs if run.path.resolve() in stochastic]

        def of(name, field):
            return [r[name][field] if r[name] else None for r in results]

        def found(field):
            return [r["diagnostics"][field] for r in results]

        def played(field):
            return [row[field] for row in both if row[field] == row[field]]

        decisions = [r["decision_us"] for r in results if r["decision_us"] is not None]
        first = [r["first_solved_steps"] for r in results]
        reached = [steps for steps in first if steps]
        kl, clip = span(found("approx_kl_median"), 4), span(found("clip_frac_median"), 3)
        entropy = span(found("entropy_first"), 2)
        return {
            "final": summary(of("final", "mean_return")),
            "solved": percent(of("final", "solved")),
            "best": summary(of("best", "mean_return")) if all(r["best"] for r in results) else "",
            "first": summary(reached, 0, False)
            + (f" ({len(reached)} of {len(first)})" if len(reached) < len(first) else ""),
            "kl": kl and f"{kl}; {max(found('approx_kl_max')):.4f}",
            "clip": clip and f"{clip}; {max(found('clip_frac_max')):.3f}",
            "ev": span(found("explained_variance_end"), 2),
            "entropy": entropy and f"{entropy} → {span(found('entropy_last'), 2)}",
            "sampled": span(played("sampled_mean"), 0),
            "timeouts": percent(played("sampled_truncated")),
            "start_entropy": span(played("start_entropy"), 2),
            "decision": span([np.median(decisions)] if decisions else [], 1),
            "minutes": summary([r["wall_clock_s"] / 60 for r in results], 1, False),
            "seeds": str(len(runs)) if runs else "",
        }

    solved = next(runs[0].solved_return for key, runs in groups.items() if key[0] == env_id)
    rows = {
        "final": "final policy, return on 50 held-out episodes",
        "solved": solved is not None and f"of these episodes solved (return at least {solved:g})",
        "best": "best checkpoint, the same 50 episodes",
        "first": solved is not None and f"environment steps to the first evaluation of at least {solved:g}",
        "kl": "approximate KL k3: medians; largest",
        "clip": "clip fraction: medians; largest",
        "ev": "explained variance at the end",
        "entropy": "entropy, nats, first → last",
        "sampled": "final policy with sampled actions",
        "timeouts": "timed out with sampled actions",
        "start_entropy": "entropy at the start states, nats",
        "decision": "one decision at batch size 1, microseconds",
        "minutes": "minutes a run",
        "seeds": "seeds",
    }
    for continuous in (False, True):
        ours, sb3 = column("ppo", continuous), column("sb3-ppo", continuous)
        if not ours["seeds"]:
            continue
        paged = env_id == "LunarLander-v3"
        yield f"| {SPACES[continuous]} actions |{' page |' * paged} this PPO | Stable-Baselines3 |"
        yield "|---|---|---|" + "---|" * paged
        page = {key: values[continuous] for key, values in PAGE.items()} | {"seeds": "5"}
        for key, title in rows.items():
            theirs = sb3[key]
            if paged and key == "final" and not continuous and theirs:
                theirs += f" (page: {PAGE_SB3})"
            if title:
                yield f"| {title} |{f' {page[key]} |' * paged} {ours[key]} | {theirs} |"
        for kind in ("sb3-a2c", "sb3-trpo"):
            other = column(kind, continuous)
            if other["seeds"]:
                plural = "s" * (other["seeds"] != "1")
                title = f"{NAMES[kind]}, final policy; {other['seeds']} seed{plural}"
                yield f"| {title} |{' |' * paged} | {other['final']} |"
        yield ""


def tasks_table(groups, stochastic):
    """The Markdown table's lines, a row for each environment: ours, Stable-Baselines3. stochastic: as above."""
    counts, rows = [], []
    for name, pair in tasks(groups).items():
        finished, returns = [[run for run in runs if run.result] for runs in pair], ([], [])
        for runs, means in zip(finished, returns, strict=True):
            for run in runs:
                row, final = stochastic.get(run.path.resolve()), run.result["final"]
                means.append(row["deterministic_mean"] if row else final["mean_return"])
                counts.append(int(row["episodes"]) if row else len(final["returns"]))
        steps = span([run.result["env_steps"] for runs in finished for run in runs], 0)
        minutes = [summary([run.result["wall_clock_s"] / 60 for run in runs], 1, False) for runs in finished]
        number = span([len(runs) for runs in finished if runs], 0)
        rows.append([name, steps, *map(summary, returns), "; ".join(minutes), number])
    title = f"final policy, return on {span(counts, 0)} held-out episodes"
    yield f"| {title} | steps | this PPO | Stable-Baselines3 | minutes: ours; SB3's | seeds |"
    yield "|---|---|---|---|---|---|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


PAPERS = {  # Schulman et al. 2017, table 1: mean normalised score over seven MuJoCo tasks
    "--objective none": -0.39,
    **{"--clip-eps 0.1": 0.76, "default": 0.82, "--clip-eps 0.3": 0.70},
    **{f"--objective kl-adaptive --kl-target {t}": x for t, x in ((0.003, 0.68), (0.01, 0.74), (0.03, 0.71))},
    **{f"--objective kl-fixed --kl-beta {b}": x for b, x in ((0.3, 0.62), (1, 0.71), (3, 0.72), (10, 0.69))},
}


def random_return(config):
    """Mean return of uniformly random actions on the final seeds."""
    env, total = common.make_policys_env(config), 0.0
    for seed in common.FINAL_SEEDS:
        env.reset(seed=seed)
        env.action_space.seed(seed)
        ended = False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, ended = total + float(reward), terminated or truncated
    env.close()
    return total / len(common.FINAL_SEEDS)


def papers_table(compared, stochastic):
    """The Markdown table's lines: the paper's table 1 beside ours, on its scale, where 0 is random and 1 the best."""
    columns = []
    for by_setting in compared.values():
        returns = {label: measures(runs, stochastic)["training"] for label, runs in by_setting.items()}
        zero = random_return(next(iter(by_setting.values()))[0].config)
        best = max((np.mean(values) for values in returns.values() if values), default=zero)  # no run has ended yet
        scores = {label: (np.array(x) - zero) / (best - zero) for label, x in returns.items() if best > zero}
        columns.append({label: summary(values, 2) for label, values in scores.items()})
    ours = " | ".join(in_words(*key) for key in compared)
    yield f"| score of the last 100 training episodes | the paper, seven tasks | {ours} |"
    yield "|" + "---|" * (len(columns) + 2)
    for label in dict.fromkeys(label for by_setting in compared.values() for label in by_setting):
        cells = [as_code(label), f"{PAPERS[label]:.2f}", *(column.get(label, "") for column in columns)]
        yield f"| {' | '.join(cells)} |"
    yield ""


def settings_table(by_setting, stochastic, title):
    """The Markdown table's lines, a row for each setting."""
    digits = {"exact_kl": 4, "clip_frac": 3, "explained_variance": 2, "entropy": 2}
    head = (title, "final policy", "sampled actions", "exact KL", "clip fraction", "explained variance")
    yield f"| {' | '.join([*head, 'entropy, nats', 'seeds'])} |"
    yield "|" + "---|" * (len(head) + 2)
    for label, runs in by_setting.items():
        found = measures(runs, stochastic)
        cells = [as_code(label), summary(found["deterministic"]), summary(found["sampled"])]
        cells += [span(found[name], n) for name, n in digits.items()]
        yield f"| {' | '.join(cells)} | {len(found['deterministic'])} |"
    yield ""


def as_code(label):
    return "default" if label == "default" else f"`{label}`"


def footnote(groups):
    """What the tables' signs mean, and where the runs were made."""
    versions = [run.versions for runs in groups.values() for run in runs]
    machines = sorted({f"{v.get('cpu', 'unknown')}, {v.get('cores', '?')} cores" for v in versions})
    return (
        '± is the standard deviation over seeds, [ ] the 95 % bootstrap interval of their mean, "to" spans the seeds. '
        f"Minutes with two runs side by side. Machine: {'; '.join(machines)}."
    )


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def read_stochastic(root):
    """{run folder: {field: number}} of every eval_stochastic.csv below root; of several with one run, the topmost."""
    rows = {}
    for path in sorted(Path(root).rglob(CSV_NAME), key=lambda path: len(path.parts), reverse=True):
        for row in common.read_csv(path):
            if not row.keys() >= set(FIELDS):
                raise common.UsageError(f"{path} is not what eval_stochastic.py writes")
            folder = path.parent if (path.parent / "config.json").exists() else path.parent / row["run"]
            rows[folder.resolve()] = {field: number(row[field], path) for field in FIELDS[1:]}
    return rows


def median_run(runs):
    """The finished run whose final return is the median (page section 6.3); None where none has finished."""
    finished = sorted((run for run in runs if run.result), key=lambda run: run.result["final"]["mean_return"])
    return finished[len(finished) // 2] if finished else None


def figures(groups, env_id, stochastic):
    """Yields (name, figure, or why there is none)."""
    yield "clip", figure_clip()
    ours = {c: groups[env_id, "ppo", c] for c in (False, True) if (env_id, "ppo", c) in groups}
    if not ours:
        yield "curves", f"no run of ppo.py on {env_id}"
        return
    for continuous, runs in ours.items():
        sb3 = groups.get((env_id, "sb3-ppo", continuous), [])
        yield f"curves-{SPACES[continuous]}", figure_curves(runs, sb3, SPACES[continuous])
    every = [run for runs in ours.values() for run in runs]
    yield "ours-and-sb3", figure_against_sb3(groups, env_id) if any(run.evals for run in every) else "no evaluations"
    rows = []
    for continuous, runs in ours.items():
        played = [run for run in runs if run.path.resolve() in stochastic]
        rows += [stochastic[run.path.resolve()] | {"seed": run.seed, "continuous": continuous} for run in played]
    yield "deterministic-and-sampled", figure_stochastic(rows, every) if rows else "run eval_stochastic.py first"
    medians = {SPACES[c]: median_run(runs) for c, runs in ours.items()}
    medians = {space: run for space, run in medians.items() if run}
    errors = {space: found for space, run in medians.items() if (found := estimators_of(run))}
    yield "kl-estimators", figure_estimators(errors) if errors else "no finished run's policies at 50 and 100 % differ"
    for space, run in medians.items():
        if env_id.startswith("LunarLander"):
            there = any((run.path / "snapshots").glob("*.pt"))
            yield f"progression-{space}", figure_progression(run, common.FINAL_SEEDS[:20]) if there else "no snapshots"


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="plot.py", description="Draw every figure from the runs below a folder.")
    parser.add_argument("folder", type=Path, help="a folder with runs below it, or one run")
    parser.add_argument("--table", action="store_true", help="print the results table as Markdown instead")
    parser.add_argument("--env-id", default=None, metavar="STR", help="whose runs [all]")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("figures"),
        metavar="FOLDER",
        help="where figures go, in a folder named like the runs' own [figures]",
    )
    return parser.parse_args(argv)


def tables(groups, stochastic):
    """The lines of the table that these runs call for."""
    env_ids, compared = {env_id for env_id, *_ in groups}, studies(groups)
    if compared and set().union(*compared.values()) <= PAPERS.keys():
        yield from papers_table(compared, stochastic)
    for key, by_setting in compared.items():
        yield from settings_table(by_setting, stochastic, in_words(*key))
    if not compared:
        several = len(env_ids) > 1
        yield from tasks_table(groups, stochastic) if several else results_table(groups, *env_ids, stochastic)
    yield footnote(groups)


def all_figures(groups, stochastic):
    """Yields (name, figure, or why there is none): those that these runs call for."""
    env_ids, compared = {env_id for env_id, *_ in groups}, studies(groups)
    for (env_id, continuous), by_setting in compared.items():
        name = "settings" + f"-{env_id}" * (len(env_ids) > 1) + f"-{SPACES[continuous]}"
        yield name, figure_settings(by_setting, stochastic, in_words(env_id, continuous))
    if not compared:
        if len(env_ids) > 1:
            yield "tasks", figure_tasks(groups)
        else:
            yield from figures(groups, *env_ids, stochastic)


def plot(args):
    torch.set_num_threads(1)
    stochastic = read_stochastic(args.folder)
    for folder, groups in load_runs(args.folder, args.env_id).items():
        if args.table:
            print("\n".join(tables(groups, stochastic)))
            continue
        out = args.out / folder.name
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in list(all_figures(groups, stochastic)):  # all drawn before any is written
            if isinstance(figure, str):
                print(f"{name}: {figure}")
                continue
            path = out / f"{name}.png"
            temporary = path.with_name(f".{path.name}")
            figure.savefig(temporary, metadata={"Software": None})
            temporary.replace(path)
            plt.close(figure)
            print(path)


def main(argv=None):
    return common.run_script("plot.py", lambda: plot(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
