"""The reference: Stable-Baselines3 at ppo.py's hyper-parameters, in a run folder of the same format.

    python sb3_reference.py --seed 0                # PPO, 2M steps
    python sb3_reference.py --seed 0 --continuous   # PPO, 1M steps
    python sb3_reference.py --seed 0 --algo a2c     # the page's other points of comparison
    python sb3_reference.py --seed 0 --algo trpo    # needs sb3-contrib

Stable-Baselines3 trains; everything that is compared, from the evaluations to the files, is `common`'s, so that
plot.py and eval_stochastic.py read both alike. As a reference only: nothing of ppo.py is used but its flags.
"""

import argparse
import math
import sys
import time
from collections import deque

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.wrappers import TransformAction, TransformObservation
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from torch.distributions import kl_divergence

import common
import ppo

# ppo.py's arguments under Stable-Baselines3's names. A2C and TRPO keep their own defaults for everything else.
SHARED = {"gamma": "gamma", "gae_lambda": "gae_lambda", "seed": "seed"}
LOSS = {"vf_coef": "vf_coef", "ent_coef": "ent_coef", "max_grad_norm": "max_grad_norm"}
NETWORK = {
    **{"hidden": "net_arch", "activation": "activation_fn", "ortho_init": "ortho_init"},
    **{
        "log_std_init": "log_std_init",
        "norm_obs": "VecNormalize's norm_obs",
        "norm_reward": "VecNormalize's norm_reward",
    },
}
ARGUMENTS = {
    "ppo": {
        **{"num_steps": "n_steps", "minibatch_size": "batch_size", "update_epochs": "n_epochs"},
        **{"clip_eps": "clip_range", "learning_rate": "learning_rate", "norm_adv": "normalize_advantage"},
        **SHARED,
        **LOSS,
    },
    "a2c": SHARED | LOSS,
    "trpo": {"num_steps": "n_steps"} | SHARED,
}
FIXED = {"ppo": {}, "a2c": {"n_steps": 8}, "trpo": {}}  # the page's A2C: rollouts of 16 x 8 (section 3.3)
RUN_ARGUMENTS = {
    *("env_id", "env_kwargs", "continuous", "total_timesteps", "eval_every", "runs_dir", "run_name", "overwrite"),
    *("num_envs", "workers"),
}
ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}


ACTIONS = {
    "categorical": Discrete,
    "multicategorical": MultiDiscrete,
    "gaussian": lambda act_dim: Box(-common.LARGEST, common.LARGEST, (act_dim,)),  # it wants finite bounds
}


def make_env(config):
    """The environment of a policy config, with the flat observations and actions that ppo.py's networks have."""
    env = common.make_policys_env(config)
    observations, actions = env.observation_space, env.action_space
    if not isinstance(observations, Box) or len(observations.shape) != 1:
        flat = Box(-np.inf, np.inf, (config["obs_dim"],), np.float32)
        env = TransformObservation(env, lambda obs: common.flat_observation(obs, observations), flat)
    if not isinstance(actions, Discrete) or actions.start:
        to_environment = common.action_map(actions)
        flat = ACTIONS[config["actor"]](config["act_dim"])
        env = TransformAction(env, lambda action: to_environment(np.asarray(action)[None])[0], flat)
    return env


def make_model(args, algo="ppo", algorithm=PPO):
    """Stable-Baselines3's model at the arguments of ppo.parse_args."""
    policy_kwargs = {
        "net_arch": {"pi": args.hidden, "vf": args.hidden},
        "activation_fn": ACTIVATIONS[args.activation],
        "ortho_init": args.ortho_init,
        "log_std_init": args.log_std_init,
    }
    if algo == "ppo":
        policy_kwargs["optimizer_kwargs"] = {"eps": args.adam_eps}
    config = common.config_of(args)
    envs = make_vec_env(lambda: make_env(config), args.num_envs, seed=args.seed)
    if args.norm_obs or args.norm_reward:
        envs = VecNormalize(envs, norm_obs=args.norm_obs, norm_reward=args.norm_reward, gamma=args.gamma)
    kwargs = {theirs: getattr(args, ours) for ours, theirs in ARGUMENTS[algo].items()} | FIXED[algo]
    return algorithm("MlpPolicy", envs, policy_kwargs=policy_kwargs, device="cpu", **kwargs)


def counterparts(args, algo):
    """Lines that say which argument of ppo.py became which of Stable-Baselines3's."""
    pairs = {"num_envs": "make_vec_env's n_envs"} | NETWORK | ARGUMENTS[algo]
    if algo == "ppo":
        pairs |= {"adam_eps": "optimizer_kwargs' eps", "anneal_lr": "lr_schedule"}
    lines = [f"  --{k.replace('_', '-'):<16} {getattr(args, k)!s:<10} -> {theirs}" for k, theirs in pairs.items()]
    return lines + [f"  {'':<29} {theirs} = {value}" for theirs, value in FIXED[algo].items()]


def find_algorithm(algo):
    if algo != "trpo":
        return {"ppo": PPO, "a2c": A2C}[algo]
    try:
        from sb3_contrib import TRPO
    except ImportError:
        raise common.UsageError("--algo trpo needs sb3-contrib: pip install sb3-contrib") from None
    return TRPO


def actor_weights(model):
    """The weights of Stable-Baselines3's actor, and the statistics of its inputs, under the names of common's."""
    policy, envs = model.policy, model.get_vec_normalize_env()
    linear = [layer for layer in policy.mlp_extractor.policy_net if isinstance(layer, torch.nn.Linear)]
    weights = {}
    for i, layer in enumerate([*linear, policy.action_net]):
        weights[f"net.layers.{i}.weight"], weights[f"net.layers.{i}.bias"] = layer.weight, layer.bias
    if hasattr(policy, "log_std"):
        weights["log_std"] = policy.log_std
    if envs is not None and envs.norm_obs:
        statistics = {"count": envs.obs_rms.count, "mean": envs.obs_rms.mean, "variance": envs.obs_rms.var}
        weights |= {f"net.norm.{name}": torch.as_tensor(value).flatten() for name, value in statistics.items()}
        weights["net.norm.count"] = weights["net.norm.count"].squeeze()
    return {name: value.detach().numpy().copy() for name, value in weights.items()}


def watch(model):
    """Have the model note, after each update, its entropy and the exact KL that the update made."""
    update = model.train

    def distribution():
        with torch.no_grad():
            return model.policy.get_distribution(obs.flatten(0, 1))

    def train():
        nonlocal obs
        obs = torch.as_tensor(model.rollout_buffer.observations)
        old = distribution().distribution
        model.update_began = time.monotonic()
        update()
        new = distribution()
        parts = zip(*(x if isinstance(x, list) else [x] for x in (old, new.distribution)), strict=True)
        kl = sum(kl_divergence(*pair) for pair in parts)  # a list holds MultiDiscrete's entries
        model.exact_kl = (kl.sum(-1) if kl.dim() > 1 else kl).mean().item()
        model.entropy = new.entropy().mean().item()

    obs = None
    model.train = train


def learner(model):
    """What a checkpoint holds of the model."""
    envs = model.get_vec_normalize_env()
    statistics = []
    if envs is not None:
        statistics = [
            [torch.as_tensor(x) for x in (rms.mean, rms.var, rms.count)] for rms in (envs.obs_rms, envs.ret_rms)
        ]
    optimizer = model.policy.optimizer.state_dict()
    return {"policy": model.policy.state_dict(), "optimizer": optimizer, "statistics": statistics}


def restore(model, run):
    """Go on from the checkpoint, if there is one, in fresh episodes: the same kind of run, not the same bits."""
    run.restore({})
    if run.checkpoint:
        model.policy.load_state_dict(run.checkpoint["learner"]["policy"])
        model.policy.optimizer.load_state_dict(run.checkpoint["learner"]["optimizer"])
        envs = model.get_vec_normalize_env()
        for rms, saved in zip(
            (envs.obs_rms, envs.ret_rms) if envs else (), run.checkpoint["learner"]["statistics"], strict=True
        ):
            rms.mean, rms.var, rms.count = saved[0].numpy(), saved[1].numpy(), saved[2].item()
        model.num_timesteps = run.env_steps
        model.ep_info_buffer = deque(({"r": r, "l": length} for r, length in run.episodes.recent), maxlen=100)
        model.ep_success_buffer = deque(maxlen=100)
        model.set_random_seed(run.args.seed + run.update)


def train(args, algo):
    """Train one run, or take up an unfinished one, and return its folder (a Path)."""
    torch.set_num_threads(1)
    args.workers = 1  # it steps its environments in this process
    algorithm = find_algorithm(algo)
    config = common.config_of(args)
    model = make_model(args, algo, algorithm)
    args.algo = algo
    run = common.Run(args, config, defaults=ppo.parse_args([]), prefix=f"sb3-{algo}")
    if run.finished:
        print(f"{run.path} has finished already; --overwrite starts it over")
        return run.path
    print(f"Stable-Baselines3's {algo.upper()} at ppo.py's arguments:", *counterparts(args, algo), sep="\n")
    restore(model, run)
    if args.anneal_lr:
        model.lr_schedule = lambda _: args.learning_rate * (1 - run.env_steps / args.total_timesteps)
    earlier_episodes = run.episodes.count
    watch(model)
    gradient_steps = {
        "ppo": args.update_epochs * -(-run.batch_size // args.minibatch_size),
        "a2c": run.batch_size // (args.num_envs * model.n_steps),
        "trpo": 1,
    }[algo]
    with common.Workers(1, config, args.seed, 1) as workers, run:
        while run.env_steps < args.total_timesteps:
            run.save_snapshots(actor_weights(model))
            clock = [time.monotonic()]
            row = learn(model, run.batch_size)
            clock += [model.update_began, time.monotonic()]
            returns = model.get_env().env_method("get_episode_rewards")
            run.episodes.count = [n + len(of_one) for n, of_one in zip(earlier_episodes, returns, strict=True)]
            run.episodes.recent = [(episode["r"], episode["l"]) for episode in model.ep_info_buffer]
            run.log_update(row, gradient_steps, [*clock, clock[-1]])
            if run.evaluation_due() and run.env_steps < args.total_timesteps:
                weights = actor_weights(model)
                run.log_evaluation(common.evaluate_with(workers, weights, common.EVAL_SEEDS), weights)
            run.save_checkpoint(learner(model))
        run.save_checkpoint(learner(model), now=True)
        run.finish(workers, actor_weights(model))
    return run.path


def learn(model, steps):
    """A rollout and its update: the row of metrics.csv. Raises RunError where either fails in any way."""
    try:
        model.learn(steps, reset_num_timesteps=False)
    except common.RunError:
        raise
    except Exception as error:
        if str(error).startswith("Expected parameter"):  # torch's, of logits, a mean or a sigma
            raise common.RunError("the policy's distribution is out of float32's range", repeats=True) from None
        raise common.RunError(f"Stable-Baselines3 raised {type(error).__name__}: {common.first_line(error)}") from error
    row = metrics_row(model)
    for name, value in row.items():
        if value is not None and math.isinf(value):
            raise common.RunError(f"{name} is {value} after this update", repeats=True)
    return row


def metrics_row(model):
    """A row of metrics.csv from the model's logger; what Stable-Baselines3 does not measure stays empty.

    Its approximate KL is the last epoch's, and A2C's losses are those of the last of many updates.
    """
    logged = model.logger.name_to_value
    row = dict.fromkeys(common.METRICS) | {
        "approx_kl_last_epoch": logged.get("train/approx_kl"),
        "clip_frac": logged.get("train/clip_fraction"),
        "explained_variance": logged.get("train/explained_variance"),
        "policy_loss": logged.get("train/policy_gradient_loss", logged.get("train/policy_loss")),
        "value_loss": logged.get("train/value_loss"),
        "learning_rate": logged.get("train/learning_rate"),
        "action_std": logged.get("train/std"),
        "entropy": -logged["train/entropy_loss"] if "train/entropy_loss" in logged else model.entropy,
        "exact_kl": model.exact_kl,
    }
    return {name: None if value is None else float(value) for name, value in row.items()}


def parse_args(argv=None):
    """(ppo.py's arguments, the algorithm's name). Refuses what has no counterpart in Stable-Baselines3."""
    parser = argparse.ArgumentParser(
        prog="sb3_reference.py",
        description="Train Stable-Baselines3 at ppo.py's hyper-parameters, as a reference. Takes ppo.py's flags, such "
        "as --seed, --continuous, --total-timesteps, --runs-dir or --overwrite, where Stable-Baselines3 has a "
        "counterpart. A finished run is passed over; an unfinished one goes on, in fresh episodes.",
        allow_abbrev=False,
    )
    parser.add_argument("--algo", choices=sorted(ARGUMENTS), default="ppo", help="trpo needs sb3-contrib [ppo]")
    own, rest = parser.parse_known_args(argv)
    args, defaults = ppo.parse_args(rest), ppo.parse_args([])
    known = RUN_ARGUMENTS | NETWORK.keys() | ARGUMENTS[own.algo].keys()
    known |= {"adam_eps", "anneal_lr"} if own.algo == "ppo" else {"num_steps"}  # how many steps make a row
    if any(word.partition("=")[0] == "--workers" for word in rest):  # its default depends on the machine
        parser.error("--workers has no counterpart in Stable-Baselines3, which steps its environments in one process")
    for name, value in vars(args).items():
        if name not in known and value != getattr(defaults, name):
            parser.error(f"--{name.replace('_', '-')} has no counterpart in Stable-Baselines3's {own.algo.upper()}")
    if own.algo == "a2c" and args.num_steps % FIXED["a2c"]["n_steps"]:
        parser.error(f"--num-steps must be a multiple of A2C's {FIXED['a2c']['n_steps']}")
    return args, own.algo


def main(argv=None):
    return common.run_script("sb3_reference.py", lambda: train(*parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
