"""What the scripts share: networks, environments, evaluation, worker processes and run folders."""

import argparse
import ast
import contextlib
import copy
import csv
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence
from torch.distributions.kl import register_kl
from tqdm import tqdm

# Held-out seeds (page sections 6 and 7). Training episodes start from seeds below 2**28, far away.
EVAL_SEEDS = [1_000_000_000 + i for i in range(10)]
FINAL_SEEDS = [2_000_000_000 + i for i in range(50)]
VIDEO_SEEDS = [3_000_000_000 + i for i in range(24)]

LARGEST = 1e38  # a number that float32 has room for

EPISODE_FIELDS = ("return", "length", "truncated", "landed", "fuel")


class UsageError(Exception):
    """Input that cannot be used: one line on standard error, exit code 2."""


class NotInstalledError(UsageError):
    """An environment's own package is not installed."""


class RunError(Exception):
    """A fault while a run was going: one line on standard error, exit code 1; the checkpoint is intact.

    repeats: whether going on from the checkpoint, exact as it is, would come to the same fault.
    """

    def __init__(self, message, repeats=False):
        super().__init__(message)
        self.repeats = repeats


# ---------------------------------------------------------------------------------------------
# Networks (page section 3.4)
# ---------------------------------------------------------------------------------------------


class Normaliser(nn.Module):
    """Running mean and variance of rows [n, *shape], to centre and scale further rows by (--norm-obs).

    Three float64 buffers, so that a policy file carries them; they move only in `update`.
    """

    LIMIT = 10.0

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))

    def update(self, x):
        """Take in rows x, [n, *shape]: the parallel update of Chan, Golub & LeVeque (1979)."""
        x, count = x.double(), self.count + len(x)
        difference = x.mean(0) - self.mean
        squares = self.variance * self.count + x.var(0, correction=0) * len(x)
        squares += difference**2 * self.count * len(x) / count
        self.mean += difference * len(x) / count
        self.variance.copy_(squares / count)
        self.count.copy_(count)

    def parameters_now(self):
        """(mean, scale) as `mlp` takes them, [*shape] float32."""
        return self.mean.float(), (self.variance + 1e-8).rsqrt().float()


class RewardScale(nn.Module):
    """Rewards divided by the running standard deviation of their discounted sum (--norm-reward).

    Engstrom et al. 2020, section 3; as Stable-Baselines3's VecNormalize does it, but a whole rollout at a time.
    """

    def __init__(self, num_envs, gamma):
        super().__init__()
        self.gamma, self.sums = gamma, Normaliser()
        self.register_buffer("sum", torch.zeros(num_envs, dtype=torch.float64))

    def forward(self, rewards, dones):
        """Take in a rollout's rewards, [T, N], and return them scaled."""
        sums = torch.empty_like(rewards, dtype=torch.float64)
        for t in range(len(rewards)):
            sums[t] = self.sum * self.gamma + rewards[t]
            self.sum.copy_(sums[t].masked_fill(dones[t], 0))
        self.sums.update(sums.flatten())
        _, scale = self.sums.parameters_now()
        return (rewards * scale).clamp(-Normaliser.LIMIT, Normaliser.LIMIT)


class MLP(nn.Module):
    """in_dim -> *hidden -> out_dim; orthogonal weights, gain sqrt(2) inside, zero biases.

    norm: a Normaliser that the inputs pass first. ortho_init=False keeps PyTorch's initialisation.
    """

    def __init__(self, in_dim, out_dim, out_gain, hidden=(64, 64), activation="tanh", norm_obs=False, ortho_init=True):
        super().__init__()
        self.activation, self.norm = activation, Normaliser(in_dim) if norm_obs else None
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in itertools.pairwise((in_dim, *hidden, out_dim)))
        for layer in self.layers if ortho_init else ():
            nn.init.orthogonal_(layer.weight, out_gain if layer is self.layers[-1] else 2**0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        norm = self.norm and self.norm.parameters_now()
        return mlp([(layer.weight, layer.bias) for layer in self.layers], x, self.activation, norm)


def mlp(layers, x, activation="tanh", norm=None):
    """The network as a function: layers [(weight, bias), ...], x [n, in_dim] -> [n, out_dim]; tensors or arrays.

    norm: (mean, scale), each [in_dim], of the inputs.
    """
    f = ACTIVATIONS[activation, type(x)]
    if norm:
        x = ((x - norm[0]) * norm[1]).clip(-Normaliser.LIMIT, Normaliser.LIMIT)
    *hidden, (out_weight, out_bias) = layers
    for weight, bias in hidden:
        x = f(x @ weight.T + bias)
    return x @ out_weight.T + out_bias


ACTIVATIONS = {
    ("tanh", torch.Tensor): torch.tanh,
    ("tanh", np.ndarray): np.tanh,
    ("relu", torch.Tensor): torch.relu,
    ("relu", np.ndarray): lambda x: np.maximum(x, 0),
}


def as_numpy(actor):
    """A copy of an actor that takes and gives arrays: 4 times as fast at the batch sizes of an environment loop."""
    actor = copy.deepcopy(actor)
    net = actor.net
    layers = [(np.asfortranarray(x.weight.detach()), x.bias.detach().numpy()) for x in net.layers]
    norm = net.norm and tuple(x.numpy() for x in net.norm.parameters_now())
    del actor.net  # a registered module must go before a plain function can have its name
    actor.net = functools.partial(mlp, layers, activation=net.activation, norm=norm)
    for name, param in list(actor.named_parameters()):
        delattr(actor, name)
        setattr(actor, name, param.detach().numpy())
    return actor


class CategoricalActor(nn.Module):
    """pi(a|s) for Discrete actions: a softmax over an MLP's logits. 4,996 parameters for 8 -> 4.

    net: the MLP's keywords, here and in the other networks.
    """

    def __init__(self, obs_dim, n_actions, **net):
        super().__init__()
        self.net = MLP(obs_dim, n_actions, out_gain=0.01, **net)
        self.noise_dim = n_actions

    def forward(self, obs):
        """[..., obs_dim] -> Categorical over [...]."""
        return Categorical(logits=self.net(obs), validate_args=False)

    def mode(self, obs):
        """[n, obs_dim] -> the most likely action of each row, [n]."""
        return self.net(obs).argmax(-1)

    def noise(self, rng, n):
        """What `sample` needs for n actions, drawn from a NumPy generator: [n, n_actions] float32."""
        return rng.gumbel(size=(n, self.noise_dim)).astype(np.float32)

    def sample(self, obs, noise):
        """a ~ pi(.|s) as a function of its noise (the Gumbel-max trick): [n, obs_dim] -> [n]."""
        return (self.net(obs) + noise).argmax(-1)


class Categoricals(Distribution):
    """Independent categoricals, one per entry of an action: log-probabilities and entropies are their sums."""

    def __init__(self, parts):
        self.parts = parts
        super().__init__(parts[0].batch_shape, torch.Size([len(parts)]), validate_args=False)

    def log_prob(self, actions):
        """actions: [..., len(parts)] -> [...]."""
        return sum(part.log_prob(action) for part, action in zip(self.parts, actions.unbind(-1), strict=True))

    def entropy(self):
        return sum(part.entropy() for part in self.parts)

    def sample(self, shape=()):
        return torch.stack([part.sample(shape) for part in self.parts], -1)


@register_kl(Categorical, Categorical)
def _kl_categorical(p, q):
    """From log-probabilities: torch's own is infinite where a probability is so small that it rounds to 0."""
    return (p.probs * (p.logits - q.logits)).sum(-1)


@register_kl(Categoricals, Categoricals)
def _kl_categoricals(p, q):
    return sum(kl_divergence(*parts) for parts in zip(p.parts, q.parts, strict=True))


class MultiCategoricalActor(CategoricalActor):
    """pi(a|s) for MultiDiscrete and MultiBinary actions: a softmax over nvec[k] logits for each entry k."""

    def __init__(self, obs_dim, nvec, **net):
        super().__init__(obs_dim, sum(nvec), **net)
        self.nvec = nvec

    def forward(self, obs):
        """[..., obs_dim] -> Categoricals over [..., len(nvec)]; log_prob and entropy are [...]."""
        return Categoricals([Categorical(logits=part, validate_args=False) for part in self._split(self.net(obs))])

    def mode(self, obs):
        """[n, obs_dim] -> the most likely action of each row, [n, len(nvec)]."""
        return self._argmax(self.net(obs))

    def sample(self, obs, noise):
        """a ~ pi(.|s) as a function of its noise: [n, obs_dim] -> [n, len(nvec)]."""
        return self._argmax(self.net(obs) + noise)

    def _split(self, logits):
        ends = itertools.accumulate(self.nvec)
        return [logits[..., end - n : end] for n, end in zip(self.nvec, ends, strict=True)]

    def _argmax(self, logits):
        stack = torch.stack if isinstance(logits, torch.Tensor) else np.stack
        return stack([part.argmax(-1) for part in self._split(logits)], -1)


class GaussianActor(nn.Module):
    """pi(a|s) for Box actions: N(mu(s), diag(sigma^2)), sigma independent of s and exp(log_std_init) at the start.

    Page section 7. 4,868 parameters for 8 -> 2.
    """

    def __init__(self, obs_dim, act_dim, log_std_init=0.0, **net):
        super().__init__()
        self.net = MLP(obs_dim, act_dim, out_gain=0.01, **net)
        self.log_std = nn.Parameter(torch.full((act_dim,), float(log_std_init)))
        self.noise_dim = act_dim

    def mean_and_log_std(self, obs):
        """[..., obs_dim] -> mu(s), [..., act_dim]; log sigma, [act_dim]. Tensors or, after `as_numpy`, arrays."""
        return self.net(obs), self.log_std

    def forward(self, obs):
        """[..., obs_dim] -> Independent Normal over [..., act_dim]; log_prob and entropy are [...]."""
        mean, log_std = self.mean_and_log_std(obs)
        return Independent(Normal(mean, log_std.exp().expand_as(mean), validate_args=False), 1)

    def mode(self, obs):
        """[n, obs_dim] -> the mean action of each row, [n, act_dim]."""
        return self.mean_and_log_std(obs)[0]

    def noise(self, rng, n):
        """What `sample` needs for n actions, drawn from a NumPy generator: [n, act_dim] float32."""
        return rng.standard_normal(size=(n, self.noise_dim), dtype=np.float32)

    def sample(self, obs, noise):
        """a ~ pi(.|s) as a function of its noise, mu + sigma * noise: [n, obs_dim] -> [n, act_dim]."""
        exp = torch.exp if isinstance(obs, torch.Tensor) else np.exp
        mean, log_std = self.mean_and_log_std(obs)
        return mean + exp(log_std) * noise


class StateStdActor(GaussianActor):
    """N(mu(s), diag(sigma(s)^2)): log sigma is a second head of the network (--std state; page section 8)."""

    def __init__(self, obs_dim, act_dim, log_std_init=0.0, **net):
        nn.Module.__init__(self)
        self.net = MLP(obs_dim, 2 * act_dim, out_gain=0.01, **net)
        self.noise_dim = act_dim
        with torch.no_grad():
            self.net.layers[-1].bias[act_dim:] += log_std_init

    def mean_and_log_std(self, obs):
        """[..., obs_dim] -> mu(s) and log sigma(s), each [..., act_dim]."""
        outputs = self.net(obs)
        return outputs[..., : self.noise_dim], outputs[..., self.noise_dim :]


class Critic(nn.Module):
    """V(s), [..., obs_dim] -> [...]. 4,801 parameters for 8 inputs."""

    def __init__(self, obs_dim, **net):
        super().__init__()
        self.net = MLP(obs_dim, 1, out_gain=1.0, **net)

    def forward(self, obs):
        return self.net(obs).squeeze(-1)


ACTORS = {"categorical": CategoricalActor, "multicategorical": MultiCategoricalActor, "gaussian": GaussianActor}
NET_KEYS = ("hidden", "activation", "norm_obs")  # what a policy config says of its network


def build_actor(config, **init):
    """The actor that a policy config (see `policy_config`) describes, with fresh weights.

    init: ortho_init; log_std_init, for Box actions.
    """
    net = {key: config[key] for key in NET_KEYS}
    if config["actor"] != "gaussian":
        init.pop("log_std_init", None)
    actor = StateStdActor if config["std"] == "state" else ACTORS[config["actor"]]
    return actor(config["obs_dim"], config["act_dim"], **net, **init)


def build_critic(config, ortho_init=True):
    """The critic beside that actor, with fresh weights."""
    return Critic(config["obs_dim"], ortho_init=ortho_init, **{key: config[key] for key in NET_KEYS})


def mean_std(gaussian_actor, obs):
    """Mean sigma over action dimensions and, where it depends on them, observations. obs: [..., obs_dim]."""
    _, log_std = gaussian_actor.mean_and_log_std(obs)
    return log_std.exp().mean().item()


def explained_variance(values, returns):
    """1 - Var[R - V] / Var[R] (page section 4.3); NaN where the returns are constant.

    values, returns: [n] tensors or arrays in reward units.
    """
    values = np.asarray(values, dtype=np.float64)
    returns = np.asarray(returns, dtype=np.float64)
    variance = returns.var()
    return float("nan") if variance == 0 else float(1 - (returns - values).var() / variance)


# ---------------------------------------------------------------------------------------------
# Environments
# ---------------------------------------------------------------------------------------------


def make_env(env_id, continuous=False, /, **kwargs):
    """gymnasium.make with this project's errors; `continuous` picks the Box-action variant of an id.

    Raises UsageError for an unknown id, a missing dependency or an id without such a variant.
    """
    spec = _find_spec(env_id)
    if continuous:
        if _takes_keyword(spec, "continuous"):
            kwargs["continuous"] = True
        else:
            env = _make(spec, kwargs)
            if not isinstance(env.action_space, Box):
                raise UsageError(f"--continuous: {env_id} has no variant with continuous actions")
            return env
    return _make(spec, kwargs)


def _find_spec(env_id):
    """The registered spec of an id. Old and misspelt ids are answered with the closest one there is."""
    module, _, registered_id = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gym.spec(registered_id)
    except Exception as error:  # a module may raise anything
        name = registered_id.rsplit("-v", 1)[0].lower()
        newest = [known for known in gym.registry if known.rsplit("-v", 1)[0].lower() == name]
        close = newest[-1:] or difflib.get_close_matches(registered_id, gym.registry, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        reason = "" if isinstance(error, gym.error.Error) else f": {first_line(error)}"
        raise UsageError(f"there is no environment {env_id!r}{reason}{hint}") from None


def _takes_keyword(spec, name):
    entry_point = spec.entry_point
    try:
        creator = gym.envs.registration.load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        return name in inspect.signature(creator).parameters
    except Exception:  # `_make` comes to it again, and says so
        return False


def _make(spec, kwargs):
    try:
        return gym.make(spec, **kwargs)
    except gym.error.DependencyNotInstalled as error:
        if "box2d" in str(error).lower():
            raise NotInstalledError(f"{spec.id} needs Box2D: pip install 'gymnasium[box2d]'") from None
        raise NotInstalledError(f"{spec.id}: {error}") from None
    except Exception as error:
        raise UsageError(f"{spec.id} cannot be made: {type(error).__name__}: {first_line(error)}") from None


def make_policys_env(config, **kwargs):
    """The environment that a policy config describes; kwargs go before its own."""
    return make_env(config["env_id"], config["continuous"], **config["env_kwargs"] | kwargs)


def policy_config(
    env_id, continuous=False, env_kwargs=None, *, hidden=(64, 64), activation="tanh", norm_obs=False, std="global"
):
    """All that playing a policy takes besides its weights; stored in every policy file.

    Raises UsageError where the spaces are not supported. Observations are a Box, flattened, or Discrete, one-hot;
    actions are Discrete, MultiDiscrete, MultiBinary or a Box of floats.
    """
    env_kwargs = dict(env_kwargs or {})
    env = make_env(env_id, continuous, **env_kwargs)
    observations, actions = env.observation_space, env.action_space
    threshold = env.spec.reward_threshold
    env.close()
    if not isinstance(observations, (Box, Discrete)):
        raise UsageError(f"{env_id}: observations must be a Box or Discrete, not {observations}")
    if isinstance(actions, Discrete):
        actor, act_dim = "categorical", int(actions.n)
    elif isinstance(actions, MultiDiscrete):
        actor, act_dim = "multicategorical", actions.nvec.ravel().tolist()
    elif isinstance(actions, MultiBinary):
        actor, act_dim = "multicategorical", [2] * int(np.prod(actions.shape))
    elif isinstance(actions, Box) and np.issubdtype(actions.dtype, np.floating):
        actor, act_dim = "gaussian", int(np.prod(actions.shape))
    else:
        raise UsageError(
            f"{env_id}: actions must be Discrete, MultiDiscrete, MultiBinary or a Box of floats, not {actions}"
        )
    obs_dim = int(observations.n if isinstance(observations, Discrete) else np.prod(observations.shape))
    if not obs_dim or not act_dim:
        raise UsageError(f"{env_id}: {observations} and {actions} leave nothing to observe or to do")
    return {
        "env_id": env_id,
        "continuous": bool(continuous),
        "env_kwargs": env_kwargs,
        "actor": actor,
        "obs_dim": obs_dim,
        "act_dim": act_dim,
        "hidden": list(hidden),
        "activation": activation,
        "norm_obs": bool(norm_obs),
        "std": std,
        "solved_return": None if threshold is None else float(threshold),
    }


def flat_observation(obs, space):
    """An observation as the networks take it, [obs_dim] float32 and a copy: a Box flattened, Discrete one-hot."""
    if isinstance(space, Discrete):
        if not space.contains(obs):
            raise ValueError(f"the observation {obs} is not in {space}")
        row = np.zeros(int(space.n), dtype=np.float32)
        row[int(obs - space.start)] = 1
        return row
    return np.array(obs, dtype=np.float32).ravel()


UNBOUNDED = 1e6  # a Box's dimension that is wider than this counts as one without bounds


def action_map(space):
    """The function from actions as sampled, [n, ...], to actions as the environment takes them, in its space.

    A Box's dimension with both bounds has its action's [-1, 1] laid over them; one without takes the action as it
    is. Then it is clipped to whatever bounds there are. Only this copy is clipped: what is stored and scored is the
    action as sampled (page section 7).
    """
    shape, dtype = space.shape, space.dtype
    if not isinstance(space, Box):
        start = getattr(space, "start", 0)
        return lambda actions: (actions.reshape(-1, *shape) + start).astype(dtype)

    low, high = space.low.ravel(), space.high.ravel()
    bounded = high.astype(np.float64) - low < UNBOUNDED
    left, right = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    centre, half = (left + right) / 2, (right - left) / 2
    scaled = (centre != 0).any() or (half != 1).any()

    def to_environment(actions):
        if not math.isfinite(actions.sum()):
            raise RunError(f"the policy's action is not finite: {actions}", repeats=True)
        if scaled:
            actions = centre + half * actions
        clipped = np.minimum(np.maximum(actions, low), high)  # a third of clip's time
        return clipped.reshape(-1, *shape).astype(dtype, copy=False)

    return to_environment


def stream(purpose, seed, *index):
    """A NumPy generator for one purpose and place of a run.

    Generators are rebuilt from (purpose, seed, index) wherever they are needed, so a run has no
    generator state to save and none that depends on which process asks.
    """
    purposes = ("episodes", "actions", "minibatches", "evaluation")
    return np.random.default_rng([purposes.index(purpose), seed, *index])


def episode_seed(seed, env_index, episode):
    """The reset seed of one training episode, below 2**28."""
    return int(stream("episodes", seed, env_index, episode).integers(2**28))


class Envs:
    """Environments `rows` of a run's `num_envs`, stepped in order with same-step autoreset.

    `obs` holds the current observations at the environments' own rows of the run's whole
    [num_envs, obs_dim] batch and zeros elsewhere: the last bits of a forward pass depend on the
    batch's size and on the row, and must not depend on how environments are spread over processes.
    """

    def __init__(self, config, seed, num_envs, rows):
        self.config, self.seed, self.rows, self.num_envs = config, seed, rows, num_envs
        # gymnasium's checker warns about a badly made environment; one of them is enough to tell
        self.envs = [make_policys_env(config, disable_env_checker=True if i else None) for i in rows]
        self.space, self.to_environment = self.envs[0].observation_space, action_map(self.envs[0].action_space)
        self.obs = np.zeros((num_envs, config["obs_dim"]), dtype=np.float32)
        self._rows = self.obs[rows.start : rows.stop]  # a view
        self.actor = build_actor(config)  # its weights come with each call
        self.episodes = [0] * len(rows)  # which episode each environment is in
        self.steps = 0  # how many steps each environment has taken

    @property
    def current(self):
        """A copy of the current observations of these environments, [len(rows), obs_dim]."""
        return self._rows.copy()

    def begin(self, episodes, steps=0, actions=None, obs=None):
        """Start environment i in its episode episodes[i], and replay actions[i] where given.

        A replay must end in the observation obs[i]. Returns the indices of the environments that
        ended elsewhere, and so are not deterministic; those stand at the start of a fresh episode.
        """
        self.steps, strayed = steps, []
        for i, index in enumerate(self.rows):
            self.episodes[i] = episodes[index]
            self._reset(i)
            if actions is None:
                continue
            for action in self.to_environment(actions[index]):
                _, terminated, truncated = self._step(i, action)
                if terminated or truncated:
                    break
            if not np.array_equal(self._rows[i], obs[index]):
                strayed.append(index)
                self.episodes[i] += 1
                self._reset(i)
        return strayed

    def step(self, actions):
        """One step of each environment. actions: [len(rows), ...], as sampled.

        Returns lists over the rows: rewards, terminated, truncated; and final observations as
        (row, [obs_dim] array) of the episodes cut by a time limit. An episode that has ended is
        followed at once by the first observation of the next.
        """
        self.steps += 1
        rewards, terminated, truncated, cut = [], [], [], []
        for i, action in enumerate(self.to_environment(actions)):
            reward, term, trunc = self._step(i, action)
            rewards.append(reward)
            terminated.append(term)
            truncated.append(trunc)
            if term or trunc:
                if trunc and not term:
                    cut.append((i, self._rows[i].copy()))
                self._check(i, reward)
                self.episodes[i] += 1
                self._reset(i)
        if not math.isfinite(sum(rewards) + self._rows.sum()):  # one sum tells for all, or that a closer look is due
            for i, reward in enumerate(rewards):
                self._check(i, reward)
        return rewards, terminated, truncated, cut

    def _step(self, i, action):
        """One step of environment i, its observation flattened into row i: reward, terminated, truncated."""
        try:
            obs, reward, terminated, truncated, _ = self.envs[i].step(action)
            self._rows[i] = flat_observation(obs, self.space)
            return float(reward), bool(terminated), bool(truncated)
        except Exception as error:
            raise RunError(f"{self._where(i)} raised in step: {type(error).__name__}: {error}") from error

    def _check(self, i, reward):
        if not math.isfinite(reward):
            raise RunError(f"{self._where(i)} gave a reward that is not finite: {reward}")
        if not np.isfinite(self._rows[i]).all():
            raise RunError(f"{self._where(i)} gave an observation that is not finite: {self._rows[i]}")

    def _reset(self, i):
        """Begin the episode that environment i is in."""
        try:
            obs, _ = self.envs[i].reset(seed=episode_seed(self.seed, self.rows[i], self.episodes[i]))
            if np.shape(obs) != self.space.shape:  # which could pass in _step, where NumPy repeats a lone number
                raise ValueError(f"an observation of shape {np.shape(obs)}, not {self.space.shape}")
            self._rows[i] = flat_observation(obs, self.space)
        except Exception as error:
            raise RunError(f"{self._where(i)} raised in reset: {type(error).__name__}: {error}") from error
        self._check(i, 0.0)

    def _where(self, i):
        index = self.rows[i]
        return (
            f"environment {index} at its step {self.steps} "
            f"(episode {self.episodes[i]}, seed {episode_seed(self.seed, index, self.episodes[i])})"
        )

    def close(self):
        for env in self.envs:
            env.close()


# ---------------------------------------------------------------------------------------------
# Evaluation (page section 3.5)
# ---------------------------------------------------------------------------------------------


UNLIMITED_STEPS = 10_000  # where an environment has no time limit, an evaluation's episode ends here, as truncated


def play(actor, env, seed, deterministic=True):
    """One episode from a reset seed, step by step: yields (obs, action, reward, terminated, truncated).

    obs is the observation that the action answers, [obs_dim]; the action is the one that the
    environment was given. actor: from `as_numpy`. deterministic: the argmax or the mean (page section
    3.5); otherwise a sample, from a generator of the episode's own.
    """
    rng = stream("evaluation", int(seed))  # not default_rng(seed), which is the environment's own stream
    to_environment = action_map(env.action_space)
    limit = UNLIMITED_STEPS if env.spec.max_episode_steps is None else math.inf
    obs, _ = env.reset(seed=int(seed))
    ended, step = False, 0
    while not ended:
        state = flat_observation(obs, env.observation_space)[None]
        if not math.isfinite(state.sum()):
            raise RunError(
                f"the evaluation from seed {seed} met an observation that is not finite: {obs}", repeats=True
            )
        action = actor.mode(state) if deterministic else actor.sample(state, actor.noise(rng, 1))
        action = to_environment(action)[0]
        obs, reward, terminated, truncated, _ = env.step(action)
        step, reward = step + 1, float(reward)
        if not math.isfinite(reward):
            raise RunError(f"the evaluation from seed {seed} met a reward that is not finite: {reward}", repeats=True)
        truncated = bool(truncated or step == limit)
        ended = terminated or truncated
        yield state[0], action, reward, bool(terminated), truncated


def evaluate(actor, config, seeds, deterministic=True):
    """Play one episode from each seed and return {field: [len(seeds)] array} over EPISODE_FIELDS.

    Episodes are played one at a time at batch size 1, so that none depends on its company. `landed`
    (the lander came to rest, its last reward +100) and `fuel` (the sum of the engine penalties: 0.30
    main, 0.03 side, scaled by throttle) are NaN off LunarLander.
    """
    actor = as_numpy(actor)
    env = make_policys_env(config)
    lander = hasattr(env.unwrapped, "lander")
    episodes = [score(play(actor, env, seed, deterministic), lander) for seed in seeds]
    env.close()
    return {field: np.array([episode[field] for episode in episodes]) for field in EPISODE_FIELDS}


def score(steps, lander):
    """What an episode of `play` comes to, {field: value} over EPISODE_FIELDS; lander: whether it is LunarLander's."""
    total, length, fuel = 0.0, 0, 0.0
    for _, action, reward, terminated, truncated in steps:  # noqa: B007
        total, length = total + reward, length + 1
        fuel += lander_fuel(action) if lander else float("nan")
    landed = float(terminated and reward == 100) if lander else float("nan")
    episode = (total, length, truncated and not terminated, landed, fuel)
    return dict(zip(EPISODE_FIELDS, episode, strict=True))


def decision_us(actor, config, count=2000):
    """Median microseconds of one deterministic decision at batch size 1, in NumPy as `play` makes it."""
    actor, obs, times = as_numpy(actor), np.zeros((1, config["obs_dim"]), dtype=np.float32), []
    for _ in range(count):
        start = time.perf_counter()
        actor.mode(obs)
        times.append((time.perf_counter() - start) * 1e6)
    return float(np.median(times))


def lander_fuel(action):
    """LunarLander's engine penalty for one action, in reward units (gymnasium's lunar_lander.py)."""
    if np.ndim(action) == 0:
        return (0.0, 0.03, 0.30, 0.03)[action]
    main, side = float(action[0]), abs(float(action[1]))
    return 0.30 * (0.5 + 0.5 * main) * (main > 0) + 0.03 * side * (side > 0.5)


def summarise(episodes, config):
    """Mean return and the rest of an evaluation's row, from what `evaluate` returned."""
    returns, solved = episodes["return"], config["solved_return"]
    return {
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std(ddof=1)) if len(returns) > 1 else float("nan"),
        "min_return": float(returns.min()),
        "solved": float("nan") if solved is None else float((returns >= solved).mean()),
        "landed": float(episodes["landed"].mean()),
        "truncated": float(episodes["truncated"].mean()),
        "mean_length": float(episodes["length"].mean()),
        "mean_fuel": float(episodes["fuel"].mean()),
    }


# ---------------------------------------------------------------------------------------------
# Worker processes
# ---------------------------------------------------------------------------------------------


def available_cores():
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


SILENCE_S = 120


@contextlib.contextmanager
def without_interrupts():
    """Hold Ctrl-C back for the moment; processes begun meanwhile never see it, and so end without a traceback."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Workers:
    """Processes that each own some of a run's environments and call functions on them.

    `start(f, *args)` has every worker call f(envs, *args); `results()` returns their answers in
    the environments' order. Functions travel by name, so they stand at the top level of a module.
    """

    def __init__(self, num_workers, config, seed, num_envs):
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's, in the processes to come: each has one core
        context = start_method()
        bounds = [num_envs * w // num_workers for w in range(num_workers + 1)]
        self.rows = [range(*pair) for pair in itertools.pairwise(bounds)]
        self.connections, self.processes = [], []
        try:
            with without_interrupts():
                for rows in self.rows:
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_serve, args=(theirs, config, seed, num_envs, rows), daemon=True)
                    process.start()
                    theirs.close()  # so that a worker's death closes the pipe
                    self.connections.append(ours)
                    self.processes.append(process)
        except BaseException:
            self.close()
            raise

    def start(self, function, *args):
        """Have each worker call function(envs, *args)."""
        self.start_each(function, [args] * len(self.connections))

    def start_each(self, function, arguments):
        """Have worker w call function(envs, *arguments[w])."""
        for worker, args in enumerate(arguments):
            try:
                self.connections[worker].send((function, args))
            except OSError:
                self._died(worker)

    def results(self):
        """What the workers' last call returned. Raises RunError for a worker that failed or died."""
        results = []
        for worker, connection in enumerate(self.connections):
            try:
                if not connection.poll(SILENCE_S):
                    rows = self.rows[worker]
                    tqdm.write(
                        f"environments {rows.start} to {rows.stop - 1} have not answered for {SILENCE_S} s, slow or "
                        "stuck; waiting on (Ctrl-C stops)",
                        file=sys.stderr,
                    )
                result, error = connection.recv()
            except (EOFError, OSError):
                self._died(worker)
            if error:
                raise RunError(error)
            results.append(result)
        return results

    def _died(self, worker):
        process, rows = self.processes[worker], self.rows[worker]
        process.join(timeout=5)
        raise RunError(
            f"worker {worker} (environments {rows.start} to {rows.stop - 1}) died, exit code {process.exitcode}"
        )

    def close(self):
        """End the processes: at once where they are idle, by force where they are not."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def start_method():
    """Fork from a clean server process where there is one: quick, and safe beside threads."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributions", "gymnasium"])
    return context


def _serve(connection, config, seed, num_envs, rows):
    """A worker's whole life: receive a function, call it on the environments, send the answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends us
    torch.set_num_threads(1)
    envs = None
    while True:
        try:
            function, args = connection.recv()
        except (EOFError, OSError):
            return  # the parent has gone
        try:
            envs = envs or Envs(config, seed, num_envs, rows)
            answer = function(envs, *args), None
        except Exception as error:
            where = f"worker for environments {rows.start} to {rows.stop - 1}: "
            answer = None, str(error) if isinstance(error, RunError) else f"{where}{type(error).__name__}: {error}"
        try:
            connection.send(answer)
        except OSError:
            return


def actor_weights(actor):
    """An actor's parameters as {name: array}, as they travel to workers and into policy files."""
    return {name: value.detach().numpy().copy() for name, value in actor.state_dict().items()}


def load_weights(actor, weights):
    actor.load_state_dict({name: torch.as_tensor(value) for name, value in weights.items()})
    return actor


def evaluate_share(envs, weights, seeds, deterministic):
    """`evaluate` as a worker runs it: its share of the seeds, on an environment of its own."""
    return evaluate(load_weights(envs.actor, weights), envs.config, seeds, deterministic)


def start_evaluation(workers, weights, seeds, deterministic=True):
    """Spread the episodes over all workers; `finish_evaluation` has the result."""
    n = len(workers.connections)
    workers.start_each(evaluate_share, [(weights, seeds[w::n], deterministic) for w in range(n)])


def finish_evaluation(workers):
    """The episodes of `start_evaluation`, in the order of their seeds."""
    shares = workers.results()
    count = sum(len(share["return"]) for share in shares)
    episodes = {field: np.empty(count, shares[0][field].dtype) for field in EPISODE_FIELDS}
    for w, share in enumerate(shares):
        for field in EPISODE_FIELDS:
            episodes[field][w :: len(shares)] = share[field]
    return episodes


def evaluate_with(workers, weights, seeds, deterministic=True):
    """`evaluate`, spread over the workers, with nothing else to do meanwhile."""
    start_evaluation(workers, weights, seeds, deterministic)
    return finish_evaluation(workers)


# ---------------------------------------------------------------------------------------------
# Files and run folders
# ---------------------------------------------------------------------------------------------


def write_atomically(path, data, previous=None):
    """Write bytes to a temporary name beside the path, then rename: never a half-written file.

    previous: a path that what is there already moves to.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    if previous and path.exists():
        os.replace(path, previous)
    os.replace(temporary, path)


def save_json(path, value):
    """Any other parser reads it too: a NaN, which JSON has not, becomes null."""

    def plain(x):
        if isinstance(x, dict):
            return {key: plain(y) for key, y in x.items()}
        if isinstance(x, list):
            return [plain(y) for y in x]
        return None if isinstance(x, float) and math.isnan(x) else x

    write_atomically(path, (json.dumps(plain(value), indent=2, allow_nan=False) + "\n").encode())


def read_json(path):
    """A JSON file's object, {key: value}."""
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not hold what it should")
    return value


def save_tensors(path, value, previous=None):
    """torch.save to memory, then to disk: the bytes depend on the value alone, not on the file's name."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomically(path, buffer.getvalue(), previous)


def load_tensors(path):
    """What `save_tensors` wrote: tensors and plain types, no code. Raises an exception where a byte has changed."""
    with zipfile.ZipFile(path) as archive:
        if archive.testzip():
            raise ValueError("its checksum does not fit")
    return torch.load(path, map_location="cpu", weights_only=True)


def save_policy(path, weights, config, env_steps):
    """A policy file: plain tensors and plain types, for `load_policy`."""
    tensors = {name: torch.as_tensor(value) for name, value in weights.items()}
    save_tensors(path, {"config": config, "env_steps": env_steps, "actor": tensors})


SINCE_ADDED = {
    "env_kwargs": {},
    "activation": "tanh",
    "norm_obs": False,
    "std": "global",
}  # what older policy files do not say


def check_module(env_id, path):
    """Raise UsageError where an environment's module, as in "module:Id-v0", would be code that came with the file."""
    package = env_id.rpartition(":")[0].partition(".")[0]
    found = importlib.util.find_spec(package) if package else None
    if found and any(Path(path).resolve().is_relative_to(p) for p in found.submodule_search_locations or ()):
        raise UsageError(f"{path}: {env_id} is code from beside the file, and is not run")


def load_policy(path):
    """Read best.pt, final.pt or a snapshot: (actor, config), on the CPU, running no code from the file.

    Raises UsageError that names the file where it is missing, is not a policy, or does not fit its environment;
    NotInstalledError where that environment's package is not installed.
    """
    try:
        saved = load_tensors(path)
        config = SINCE_ADDED | saved["config"]
        check_module(config["env_id"], path)
        with torch.device("meta"):  # shapes alone, so that a file's sizes are compared before they take memory
            actor = build_actor(config, ortho_init=False)
        weights = {name: saved["actor"][name].to(like.dtype) for name, like in actor.state_dict().items()}
        actor.load_state_dict(weights, assign=True)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{path} is not a policy file: {first_line(error)}") from None
    if not all(value.isfinite().all() for value in weights.values()):
        raise UsageError(f"{path} holds weights that are not finite")
    try:
        needed = policy_config(config["env_id"], config["continuous"], config["env_kwargs"])
    except UsageError as error:
        raise type(error)(f"{path}: {error}") from None
    for key in ("actor", "obs_dim", "act_dim"):
        if config[key] != needed[key]:
            raise UsageError(f"{path} does not fit {config['env_id']}: {key} is {config[key]}, not {needed[key]}")
    return actor, config


def is_number(value):
    """Whether it is a number within float32's range, and not NaN."""
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def is_number_or_none(value):
    return value is None or is_number(value)


def is_whole(value):
    return type(value) is int and 0 <= value <= LARGEST


def is_text(value):
    return isinstance(value, str) and value.isprintable()


# What the scripts use of a run's two JSON files: {field: its own fields, or whether a value fits}
CONFIG = {
    "args": {
        "seed": is_whole,
        "env_id": lambda value: is_text(value) and re.fullmatch(r"[\w:./-]+", value),
        "total_timesteps": is_whole,
    },
    "policy": {"actor": lambda value: is_text(value) and value in ACTORS, "solved_return": is_number_or_none},
    "versions": {"cpu": is_text, "cores": is_number_or_none},
}
PLAYED = {"mean_return": is_number, "solved": is_number_or_none, "returns": lambda value: isinstance(value, list)}
RESULT = {
    **{"env_steps": is_whole, "wall_clock_s": is_number, "first_solved_steps": is_number_or_none},
    "decision_us": is_number_or_none,
    "final": PLAYED,
    "best": lambda value: value is None or misfit(value, PLAYED) is None,
    "diagnostics": dict.fromkeys(
        (
            *("approx_kl_median", "approx_kl_max", "clip_frac_median", "clip_frac_max", "explained_variance_end"),
            *("entropy_first", "entropy_last", "train_return_last"),
        ),
        is_number_or_none,
    ),
}


def misfit(value, expected):
    """The name of the first field of a JSON value that is missing or does not fit (see CONFIG), or None."""
    if not isinstance(value, dict):
        return "all of it"
    for name, fits in expected.items():
        if name not in value:
            return name
        if inner := misfit(value[name], fits) if isinstance(fits, dict) else not fits(value[name]):
            return name if inner is True else f"{name}, {inner}"
    return None


def run_config(run):
    """A run folder's config.json. Raises UsageError that names the file where it is not a run's."""
    path = run / "config.json"
    if not path.exists():
        raise UsageError(f"{run} is not a run folder: it has no config.json")
    config = read_json(path)
    if wrong := misfit(config, CONFIG):
        raise UsageError(f"{path} is not a run's: {wrong}")
    check_module(config["args"]["env_id"], path)
    return config


def run_result(run):
    """A run folder's result.json, None where it has not finished. Raises UsageError where it is not a run's."""
    path = run / "result.json"
    if not path.exists():
        return None
    result = {"decision_us": None} | read_json(path)
    if wrong := misfit(result, RESULT):
        raise UsageError(f"{path} is not a run's: {wrong}")
    return result


def load_runs_policy(run, name):
    """(actor, config) of a run folder's policy file, such as "best.pt".

    Raises UsageError that names the file where it is not a policy, or is another run's than config.json describes.
    """
    actor, config = load_policy(run / name)
    expected = SINCE_ADDED | run_config(run)["policy"]
    different = sorted(key for key in config.keys() | expected.keys() if config.get(key) != expected.get(key))
    if different:
        raise UsageError(f"{run / name} does not fit the run's config.json: {', '.join(different)}")
    return actor, config


def load_snapshots(run):
    """A run's policies during training, {percent of the budget: (actor, config)} in that order.

    Raises UsageError that names what is not a snapshot of this run, or the run where there is none.
    """
    snapshots = {}
    for path in sorted((run / "snapshots").glob("*.pt")):
        if not re.fullmatch(r"\d{3}\.\d", path.stem):
            raise UsageError(f"{path}: a snapshot is named for its percentage of the budget, such as 002.5.pt")
        snapshots[float(path.stem)] = load_runs_policy(run, path.relative_to(run))
    if not snapshots:
        raise UsageError(f"{run} has no snapshots")
    return snapshots


@contextlib.contextmanager
def playing(path):
    """Name the policy's file in whatever stops it from being played."""
    try:
        yield
    except RunError as error:
        raise UsageError(f"{path} cannot be played: {first_line(error)}") from None


def check_writable(path):
    """Raise UsageError where a file cannot be written at the path, before the work that it is to hold."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise UsageError(f"{path} is a folder")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UsageError(f"cannot write {path}: {folder} is not a folder that can be written")


def lock(folder):
    """Hold a folder for this process: a descriptor to close, or None where the system has no such locks.

    Raises UsageError where another process holds it. The lock goes with its process, however that ends.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"{folder} is in use by another process") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def find_runs(root):
    """The run folders at or below root (those with a config.json), sorted."""
    return sorted({path.parent for path in Path(root).rglob("config.json")})


def run_name(name):
    """A name made fit for a folder: whatever is not a letter, digit, dot, dash or underscore becomes a dash."""
    return re.sub(r"[^\w.-]+", "-", name)


def versions():
    """What a result may depend on besides its arguments."""
    packages = ("torch", "gymnasium", "numpy", "Box2D", "stable-baselines3", "sb3-contrib")
    found = {}
    for package in packages:
        try:
            found[package.lower()] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package.lower()] = None
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    machine = {"platform": platform.platform(), "cpu": cpu_name(), "cores": available_cores()}
    return {"python": platform.python_version(), **found, **machine, "git_commit": commit}


def cpu_name():
    try:
        return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


class CsvLog:
    """A CSV file that grows by a row at a time, and its whole text: with that, a checkpoint can write it anew."""

    def __init__(self, path, fields, text=""):
        self.path, self.fields = path, fields
        self.text = text or csv_text(fields, [])
        self.rows = parse_csv(self.text)
        self.save()

    def save(self):
        """Have the disk hold all of it."""
        write_atomically(self.path, self.text.encode())

    def append(self, row):
        """Add a row, {field: value}."""
        line = csv_text(self.fields, [row]).partition("\n")[2]
        self.text += line
        self.rows.append(csv_row(self.fields, row))
        try:
            with open(self.path, "a", newline="") as file:
                file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def csv_row(fields, row):
    """A row as text. Numbers are written so that float32 survives; what is NaN or None is left empty."""

    def text(value):
        if value is None or value != value:
            return ""
        return str(value) if isinstance(value, (int, str)) else format(value, ".9g")

    return {field: text(row[field]) for field in fields}


def csv_text(fields, rows):
    """A header and rows, {field: value}, as CSV."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(csv_row(fields, row) for row in rows)
    return buffer.getvalue()


def parse_csv(text):
    """The whole rows of a CSV file's text as {field: text}; a last line that was cut short is left out."""
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def read_csv(path):
    """The rows of a CSV file, as `parse_csv` gives them. Raises UsageError where they do not fit the header."""
    try:
        rows = parse_csv(Path(path).read_text())
        if not all(None not in row and None not in row.values() for row in rows):
            raise ValueError("a row is not as long as the header")
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from None
    return rows


# ---------------------------------------------------------------------------------------------
# A training run
# ---------------------------------------------------------------------------------------------


def config_of(args):
    """The policy config of a training script's arguments. Raises UsageError where it cannot be trained here."""
    net = {key: getattr(args, key) for key in NET_KEYS}
    config = policy_config(args.env_id, args.continuous, args.env_kwargs, std=args.std, **net)
    if config["actor"] != "gaussian" and (args.std != "global" or args.log_std_init):
        raise UsageError(f"--std and --log-std-init are a Gaussian actor's, and {args.env_id} takes none")
    _check_memory(args, config)
    return config


def _check_memory(args, config):
    obs_dim, hidden = config["obs_dim"], config["hidden"]
    act_dim = sum(config["act_dim"]) if isinstance(config["act_dim"], list) else config["act_dim"]
    weights = 2 * sum(a * b for a, b in itertools.pairwise((obs_dim, *hidden, max(act_dim, 1))))
    rollout = args.num_envs * args.num_steps * (3 * obs_dim + 2 * act_dim + max(hidden) + 20)  # numbers at a time
    needed = 4 * (rollout + 10 * weights) / 1e9
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, ValueError):  # Windows
        return
    if needed > there:
        raise UsageError(
            f"a rollout of {args.num_envs} x {args.num_steps} steps with {obs_dim} numbers an observation and the "
            f"networks would take about {needed:,.0f} GB, and this machine has {there:.0f} GB"
        )


class EpisodeLog:
    """The training episodes: the returns of the last 100 that ended, and what rebuilds the unfinished ones.

    An environment cannot be saved, but an episode follows from its seed and its actions. `count` is
    the number of the episode that each environment is in, `actions` what it has been given since.
    """

    def __init__(self, num_envs):
        self.count = [0] * num_envs
        self.returns = [0.0] * num_envs  # of the unfinished episodes, so far
        self.lengths = [0] * num_envs
        self.actions = [[] for _ in range(num_envs)]  # of the unfinished episodes, an array per rollout
        self.obs = np.zeros((num_envs, 0), np.float32)  # [N, obs_dim], where the unfinished episodes stand
        self.recent = []  # (return, length) of the last 100 that ended

    def add(self, rewards, dones, actions, obs):
        """Take in a rollout: rewards (float64, no bootstrap), dones, actions [T, N, ...]; obs [N, obs_dim] after."""
        ended = []
        for i in range(len(self.count)):
            start = 0
            for end in np.flatnonzero(dones[:, i]) + 1:
                total = self.returns[i] + float(rewards[start:end, i].sum())
                ended.append((int(end), i, total, self.lengths[i] + int(end) - start))
                self.count[i] += 1
                self.returns[i], self.lengths[i], self.actions[i] = 0.0, 0, []
                start = int(end)
            self.returns[i] += float(rewards[start:, i].sum())
            self.lengths[i] += len(rewards) - start
            self.actions[i].append(actions[start:, i].copy())
        self.recent = (self.recent + [episode[2:] for episode in sorted(ended)])[-100:]
        self.obs = obs

    def mean(self, which):
        """Mean return (0) or length (1) of the last 100 episodes; None where none has ended yet."""
        return sum(episode[which] for episode in self.recent) / len(self.recent) if self.recent else None

    def forget(self, indices):
        """Give up the unfinished episodes of these environments: their next ones have begun."""
        for i in indices:
            self.count[i] += 1
            self.returns[i], self.lengths[i], self.actions[i] = 0.0, 0, []

    def state(self):
        actions = [torch.from_numpy(np.concatenate(a)) if a else torch.zeros(0) for a in self.actions]
        return {
            "count": self.count,
            "returns": self.returns,
            "lengths": self.lengths,
            "recent": self.recent,
            "actions": actions,
            "obs": torch.from_numpy(self.obs),
        }

    def restore(self, state):
        self.count, self.returns, self.lengths = state["count"], state["returns"], state["lengths"]
        self.recent, self.obs = state["recent"], state["obs"].numpy()
        self.actions = [[actions.numpy()] for actions in state["actions"]]


METRICS = (
    *("env_steps", "gradient_steps", "episodes", "train_return_100"),
    *("approx_kl", "approx_kl_last_epoch", "kl_k1", "kl_k2", "exact_kl", "clip_frac", "entropy"),
    *("explained_variance", "policy_loss", "value_loss", "grad_norm", "learning_rate", "action_std"),
    *("ent_coef", "kl_beta"),
    *("rollout_s", "update_s", "eval_s", "steps_per_s"),
)
EVALS = (
    *("env_steps", "mean_return", "std_return", "min_return"),
    *("solved", "landed", "truncated", "mean_length", "mean_fuel"),
)
SNAPSHOTS = (0, 2.5, 10, 25, 50, 100)  # percent of the budget
CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous.pt")  # the latest, and the one before in case of damage
MACHINE_ARGS = ("workers", "runs_dir", "run_name", "overwrite")  # what does not change a run's results

# Stable-Baselines3's TensorBoard tags, and the column of metrics.csv (its entropy loss is minus the entropy).
TENSORBOARD = {
    "rollout/ep_rew_mean": "train_return_100",
    "time/fps": "steps_per_s",
    "train/approx_kl": "approx_kl",
    "train/clip_fraction": "clip_frac",
    "train/explained_variance": "explained_variance",
    "train/learning_rate": "learning_rate",
    "train/policy_gradient_loss": "policy_loss",
    "train/value_loss": "value_loss",
    "train/std": "action_std",
    "train/ent_coef": "ent_coef",
    "train/kl_beta": "kl_beta",
    "train/entropy": "entropy",
    "train/exact_kl": "exact_kl",
    "train/grad_norm": "grad_norm",
}


class Run:
    """A run's folder and its progress: what it has logged, and where it resumes.

    Opening it creates the folder, or checks that it was made with the same arguments. defaults: those of the
    arguments, which an older folder's config.json may not know.
    """

    def __init__(self, args, config, defaults, prefix="ppo"):
        self.args, self.config, self.defaults = args, config, vars(defaults)
        if args.total_timesteps is None:
            args.total_timesteps = 1_000_000 if config["actor"] == "gaussian" else 2_000_000
        variant = "-continuous" if args.continuous else ""
        name = run_name(f"{prefix}_{args.env_id}{variant}_s{args.seed}") if args.run_name is None else args.run_name
        if not name or name != Path(name).name or name in (".", "..") or not name.isprintable():
            raise UsageError(f"--run-name {name!r} is not the name of a folder inside --runs-dir")
        self.path = Path(args.runs_dir) / name
        self.batch_size = args.num_envs * args.num_steps
        self.update = 0  # how many rollouts have been trained on
        self.gradient_steps = 0
        self.episodes = EpisodeLog(args.num_envs)
        self.best, self.first_solved, self.wall_s = None, None, 0.0
        self._row_ended, self.compiled = None, False
        self.checkpoint, self._checkpoint_cost, self._checkpoint_time = None, 0.0, float("-inf")
        self._lock = None
        try:
            self._open()
        except BaseException as error:
            self._unlock()
            if isinstance(error, (OSError, ValueError)):  # a path with a NUL is a ValueError
                reason = getattr(error, "strerror", error)
                raise UsageError(f"cannot write the run folder {self.path}: {reason}") from None
            raise

    @property
    def env_steps(self):
        return self.update * self.batch_size

    @property
    def finished(self):
        result = self.path / "result.json"
        if result.exists() and "final" not in read_json(result):
            raise UsageError(f"{result} does not hold what it should; --overwrite starts the run over")
        return result.exists()

    def _open(self):
        """Make the folder, or take up what is there. Writes nothing where it refuses."""
        path, args = self.path, self.args
        str(path).encode()  # as TensorBoard will have to: a ValueError where it is not Unicode
        if args.overwrite and path.is_symlink():
            raise UsageError(f"--overwrite: {path} is a symbolic link; give --runs-dir and --run-name of what it means")
        if path.exists() and not (path / "config.json").exists() and any(path.iterdir()):
            raise UsageError(f"{path} is not empty and not a run folder; choose another --run-name")
        path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(path)
        if args.overwrite and (path / "config.json").exists():
            old = path.with_name(f".{path.name}.old")  # so that no half of it is left under its name
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
            (old / "config.json").unlink()
            shutil.rmtree(old)
            self._unlock()
            path.mkdir()
            self._lock = lock(path)
        if (path / "config.json").exists():
            self._compare(read_json(path / "config.json"))
        else:
            save_json(path / "config.json", {"args": vars(args), "policy": self.config, "versions": versions()})
        (path / "snapshots").mkdir(exist_ok=True)
        for left_over in path.rglob("*.tmp"):  # of a process that was killed
            left_over.unlink()
        if self.finished:
            self._unlock()
        else:
            self.checkpoint = self._load_checkpoint()

    def _unlock(self):
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _compare(self, saved):
        ours = json.loads(json.dumps(vars(self.args)))  # as they are in the file
        theirs = self.defaults | saved["args"] if isinstance(saved.get("args"), dict) else {}
        different = [k for k in ours if k not in MACHINE_ARGS and ours[k] != theirs.get(k)]
        if different:
            listed = ", ".join(f"--{k.replace('_', '-')} {theirs.get(k)} (now {ours[k]})" for k in different)
            raise UsageError(f"{self.path} was made with {listed}; choose another --run-name, or --overwrite it")

    def _load_checkpoint(self):
        """The latest checkpoint that is whole; None where there is none at all."""
        damaged = []
        for path in (self.path / name for name in CHECKPOINTS):
            try:
                state = load_tensors(path)
                if damaged:
                    print(f"{'; '.join(damaged)}; going on from {path.name}", file=sys.stderr)
                return state
            except FileNotFoundError:
                pass
            except Exception as error:
                damaged.append(f"{path} cannot be read ({first_line(error)})")
        if damaged:
            raise UsageError(f"{'; '.join(damaged)}; --overwrite starts the run over")
        return None

    def restore(self, learner):
        """Put the checkpoint, if there is one, into the learner's tensors and this run's progress."""
        state = self.checkpoint or {}
        if state:
            for name, tensor in learner.items():
                tensor.copy_(state["learner"][name])
            self.update, self.best, self.first_solved = state["update"], state["best"], state["first_solved"]
            self.gradient_steps, self.wall_s = state["gradient_steps"], state["wall_s"]
            self.episodes.restore(state["episodes"])
        self.metrics = CsvLog(self.path / "metrics.csv", METRICS, state.get("metrics"))
        self.evals = CsvLog(self.path / "evals.csv", EVALS, state.get("evals"))

    def begin_environments(self, workers):
        """Start every environment in the episode it is in, replaying the unfinished ones after a resume."""
        log = self.episodes
        if self.env_steps >= self.args.total_timesteps:
            return  # only the last evaluations are left
        if self.checkpoint is None:
            workers.start(Envs.begin, log.count)
            workers.results()
            return
        actions = [np.concatenate(a) for a in log.actions]
        workers.start(Envs.begin, log.count, self.update * self.args.num_steps, actions, log.obs)
        strayed = [i for share in workers.results() for i in share]
        log.forget(strayed)
        if strayed:
            self.progress.say(
                f"{self.args.env_id} is not deterministic: the replay of environment{'s' * (len(strayed) > 1)} "
                f"{', '.join(map(str, strayed))} ended elsewhere; going on from fresh episodes"
            )

    def note_compiled(self, compiled):
        """Whether the update is compiled, or could not be; a run that goes on the other way says so."""
        self.compiled = compiled
        if self.checkpoint and self.checkpoint["compiled"] != compiled:
            self.progress.say(
                f"so far the update was {'not ' * compiled}compiled, and now it is{' not' * (not compiled)}: "
                "from here on it rounds differently, and the bits are not those of an undisturbed run"
            )

    def __enter__(self):
        from torch.utils.tensorboard import SummaryWriter

        self._start = time.monotonic()
        self.tensorboard = SummaryWriter(self.path, purge_step=self.env_steps + 1)
        self.progress = Progress(self)
        return self

    def __exit__(self, kind, error, _):
        self.progress.close()
        try:
            self.tensorboard.close()
        except OSError as closing:
            error = error or closing
        self._unlock()
        if isinstance(error, KeyboardInterrupt):
            verb = "go on" if (self.path / CHECKPOINTS[0]).exists() else "start over"
            print(f"stopped after {self.env_steps:,} steps; to {verb}: {command_line()}", file=sys.stderr)
        if isinstance(error, OSError):
            raise RunError(str(error)) from None

    def elapsed(self):
        """Seconds of work in this run, over all its sittings."""
        return self.wall_s + time.monotonic() - self._start

    def evaluation_due(self):
        """Whether the last update crossed a multiple of --eval-every. Follows from the step count alone."""
        every = self.args.eval_every
        return bool(every and self.update and self.env_steps // every > (self.env_steps - self.batch_size) // every)

    def save_snapshots(self, weights):
        """Save the policy under each percentage of the budget that the last update reached."""
        for percent in SNAPSHOTS:
            target = percent / 100 * self.args.total_timesteps
            if self.env_steps - self.batch_size < target <= self.env_steps:
                save_policy(self.path / "snapshots" / f"{percent:05.1f}.pt", weights, self.config, self.env_steps)

    def log_evaluation(self, episodes, weights):
        """A row of evals.csv for the policy at the present step count, and best.pt where it is the best yet."""
        row = {"env_steps": self.env_steps, **summarise(episodes, self.config)}
        self.evals.append(row)
        self.tensorboard.add_scalar("eval/mean_reward", row["mean_return"], self.env_steps)
        self.tensorboard.add_scalar("eval/mean_ep_length", row["mean_length"], self.env_steps)
        solved = self.config["solved_return"]
        if self.first_solved is None and solved is not None and row["mean_return"] >= solved:
            self.first_solved = self.env_steps
        if self.best is None or row["mean_return"] > self.best:
            self.best = row["mean_return"]
            save_policy(self.path / "best.pt", weights, self.config, self.env_steps)

    def log_update(self, row, gradient_steps, clock):
        """A row of metrics.csv for the update that just ended; clock: when its phases began and ended."""
        self.update += 1
        self.gradient_steps += gradient_steps
        seconds = dict(zip(("rollout_s", "update_s", "eval_s"), np.diff(clock).tolist(), strict=True))
        began, self._row_ended = self._row_ended or clock[0], time.monotonic()
        row = row | seconds | {"steps_per_s": self.batch_size / (self._row_ended - began)}  # logging included
        row |= {"env_steps": self.env_steps, "gradient_steps": self.gradient_steps}
        row["episodes"] = sum(self.episodes.count)
        row["train_return_100"] = self.episodes.mean(0)
        self.metrics.append(row)
        for tag, column in TENSORBOARD.items():
            if row[column] is not None:
                self.tensorboard.add_scalar(tag, row[column], self.env_steps)
        self.tensorboard.add_scalar("train/entropy_loss", -row["entropy"], self.env_steps)
        if self.episodes.recent:
            self.tensorboard.add_scalar("rollout/ep_len_mean", self.episodes.mean(1), self.env_steps)
        self.progress.update(row)

    def save_checkpoint(self, learner, now=False):
        """Write checkpoint.pt, unless that would cost more than a fiftieth of the time since the last one."""
        start = time.monotonic()
        if not now and start - self._checkpoint_time < 50 * self._checkpoint_cost:
            return
        state = {
            "learner": learner,
            "update": self.update,
            "gradient_steps": self.gradient_steps,
            "compiled": self.compiled,
            "best": self.best,
            "first_solved": self.first_solved,
            "wall_s": self.elapsed(),
            "episodes": self.episodes.state(),
            "metrics": self.metrics.text,
            "evals": self.evals.text,
        }
        latest, previous = (self.path / name for name in CHECKPOINTS)
        save_tensors(latest, state, previous)
        self._checkpoint_time = time.monotonic()
        self._checkpoint_cost = self._checkpoint_time - start

    def finish(self, workers, weights):
        """The last evaluations, final.pt and result.json; then the checkpoint goes."""
        self.save_snapshots(weights)
        if self.args.eval_every:
            self.log_evaluation(evaluate_with(workers, weights, EVAL_SEEDS), weights)
        save_policy(self.path / "final.pt", weights, self.config, self.env_steps)
        result = {"env_steps": self.env_steps}
        for name in ("final", "best"):
            result[name] = None
            if (self.path / f"{name}.pt").exists():
                actor, _ = load_policy(self.path / f"{name}.pt")
                env_steps = load_tensors(self.path / f"{name}.pt")["env_steps"]
                if name == "final" or env_steps != self.env_steps:  # the best policy may be the final one
                    episodes = evaluate_with(workers, actor_weights(actor), FINAL_SEEDS)
                summary = summarise(episodes, self.config)
                result[name] = {"env_steps": env_steps, **summary, "returns": episodes["return"].tolist()}
        result["first_solved_steps"] = self.first_solved
        result["wall_clock_s"] = self.elapsed()
        result["decision_us"] = decision_us(load_policy(self.path / "final.pt")[0], self.config)
        result["diagnostics"] = diagnostics(self.metrics.rows)
        self.progress.close()
        self.metrics.save()
        self.evals.save()
        save_json(self.path / "result.json", result)
        for name in CHECKPOINTS:
            (self.path / name).unlink(missing_ok=True)
        print("\n".join(closing_lines(self, result)))


def one_line(error):
    """An exception's text with its lines joined."""
    return " ".join(str(error).split("\n"))


def first_line(error):
    """The first line of an exception's text, or its name where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Progress:
    """A tqdm bar on a terminal; elsewhere a plain line for every twentieth of the budget."""

    def __init__(self, run):
        self.run, self.total = run, run.args.total_timesteps
        args = run.args
        self.say(
            f"{args.env_id}{' (continuous)' if args.continuous else ''}, seed {args.seed}: {self.total:,} steps in "
            f"rollouts of {args.num_envs} x {args.num_steps}, {args.workers} worker{'s' * (args.workers > 1)} "
            f"-> {run.path}"
        )
        if run.env_steps:
            self.say(f"resuming at {run.env_steps:,} steps")
        self.bar = tqdm(
            total=self.total, initial=run.env_steps, unit=" steps", unit_scale=True, disable=not sys.stderr.isatty()
        )

    def say(self, text):
        tqdm.write(text)

    def update(self, row):
        run = self.run
        parts = {
            "return": row["train_return_100"],
            "eval": float(run.evals.rows[-1]["mean_return"]) if run.evals.rows else None,
            "KL": row["exact_kl"] if row["approx_kl"] is None else row["approx_kl"],
        }
        formats = {"return": "{:.1f}", "eval": "{:.1f}", "KL": "{:.4f}"}
        parts = {k: formats[k].format(value) if value is not None else "-" for k, value in parts.items()}
        if not self.bar.disable:
            self.bar.set_postfix(parts, refresh=False)
            self.bar.update(min(run.env_steps, self.total) - self.bar.n)
        elif run.env_steps * 20 // self.total > (run.env_steps - run.batch_size) * 20 // self.total:
            listed = "  ".join(f"{k} {text}" for k, text in parts.items())
            self.say(f"{run.env_steps:>10,} steps  {row['steps_per_s']:>7,.0f} steps/s  {listed}")

    def close(self):
        self.bar.close()


def diagnostics(rows):
    """The diagnostics of a whole run in a few numbers, from the rows of metrics.csv."""

    def over(name, function):
        values = np.array([float(row[name]) for row in rows if row[name]])
        return float(function(values)) if len(values) else None

    return {
        "approx_kl_median": over("approx_kl", np.median),
        "approx_kl_max": over("approx_kl", np.max),
        "clip_frac_median": over("clip_frac", np.median),
        "clip_frac_max": over("clip_frac", np.max),
        "clip_frac_above_0.3": over("clip_frac", lambda x: (x > 0.3).mean()),
        "explained_variance_last": over("explained_variance", lambda x: x[-1]),
        "explained_variance_end": over("explained_variance", lambda x: x[-max(1, len(x) // 10) :].mean()),  # last tenth
        "entropy_first": over("entropy", lambda x: x[0]),
        "entropy_last": over("entropy", lambda x: x[-1]),
        "action_std_first": over("action_std", lambda x: x[0]),
        "action_std_last": over("action_std", lambda x: x[-1]),
        "train_return_last": over("train_return_100", lambda x: x[-1]),
    }


KL_SPIKE = 0.03  # three times the largest k3 of the page's ten runs


def verdict(found, deterministic_return):
    """What the diagnostics say, in words (page sections 4.1 to 4.3 and 7). found: from `diagnostics`."""
    said = []
    if (found["approx_kl_max"] or 0) > KL_SPIKE:
        said.append(
            f"a KL spike to {found['approx_kl_max']:.3f}: some update moved the policy too far, "
            "lower the learning rate or the epochs"
        )
    if found["clip_frac_above_0.3"]:
        said.append(
            f"clip fraction above 0.3 in {found['clip_frac_above_0.3']:.0%} of the rollouts: most samples no longer "
            "contribute, lower the learning rate or the epochs"
        )
    explained = found["explained_variance_end"]
    if explained is not None and explained < 0.005:
        said.append(
            f"explained variance {explained:z.2f} over the last tenth of the run: the critic is no better than a "
            "constant (large returns may saturate its tanh units for good: try --norm-reward), unless the returns "
            "hardly vary any more"
        )
    sampled, std = found["train_return_last"], found["action_std_last"]
    if std is not None and sampled is not None and std > 0.7 * found["action_std_first"]:
        if deterministic_return - sampled > 0.25 * abs(deterministic_return):
            said.append(
                f"sigma stayed at {std:.2f}, so the training return ({sampled:.0f}, sampled actions) understates "
                f"the deterministic policy ({deterministic_return:.0f})"
            )
    if said:
        return "; ".join(said)
    figures = (
        ("KL at most {:.4f}", found["approx_kl_max"]),
        ("clip fraction at most {:.2f}", found["clip_frac_max"]),
        ("explained variance {:.2f} at the end", explained),
    )
    return "healthy: " + ", ".join(text.format(value) for text, value in figures if value is not None)


def closing_lines(run, result):
    """What a finished run prints last."""
    lines = []
    for name in ("final", "best"):
        found = result[name]
        if found:
            shares = [f"{found[k]:.0%} {k}" for k in ("solved", "landed", "truncated") if found[k] == found[k]]
            lines.append(
                f"{name + ' policy':>14}  {found['mean_return']:.1f} +- {found['std_return']:.1f} over "
                f"{len(found['returns'])} held-out episodes, {', '.join(shares)} ({found['env_steps']:,} steps)"
            )
    solved = run.config["solved_return"]
    if solved is not None and run.args.eval_every:
        first = result["first_solved_steps"]
        lines.append(f"{f'first >= {solved:.0f}':>14}  " + (f"at {first:,} steps" if first else "never"))
    lines.append(f"{'wall-clock':>14}  {result['wall_clock_s']:.0f} s")
    lines.append(f"{'run folder':>14}  {run.path}")
    lines.append(f"{'diagnostics':>14}  {verdict(result['diagnostics'], result['final']['mean_return'])}")
    return lines


# ---------------------------------------------------------------------------------------------
# Command lines
# ---------------------------------------------------------------------------------------------


def env_kwargs(words):
    """key=value words as {key: value}; a value is a Python literal, true, false, none, or else text."""
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (equals and key.isidentifier()):
            raise UsageError(f"--env-kwargs takes key=value, not {word!r}")
        try:
            value = {"true": True, "false": False, "none": None}[text.lower()]
        except KeyError:
            try:
                value = json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))  # what config.json can hold
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                value = text
        found[key] = value
    return found


def number(kind, low, high=None):
    """An argparse type: an int or a float from low to high, or to LARGEST."""
    high = LARGEST if high is None else high

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {'a whole number' if kind is int else 'a number'}"
            ) from None
        if not low <= value <= high:  # a NaN neither
            bound = f"between {low} and {high}"
            if high == LARGEST:
                bound = f"at most {high}" if value > high else f"at least {low}"
            raise argparse.ArgumentTypeError(f"{text.strip()} is not {bound}")
        return value

    parse.__name__ = kind.__name__
    return parse


def command_line():
    """The command that goes on with this process's run: the one it was given, less --overwrite."""
    return shlex.join(["python", *(word for word in sys.argv if word != "--overwrite")])


def run_script(name, script):
    """Run a script's main function: errors of use and of runs take one line. Returns the exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    for stream_name in ("stdout", "stderr"):
        if getattr(sys, stream_name) is None:  # the shell has closed it
            setattr(sys, stream_name, open(os.devnull, "w"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: a path may hold what it cannot encode
    try:
        try:
            script()
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is answered
    except UsageError as error:
        print(f"{name}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except RunError as error:
        advice = f"to go on from the last checkpoint: {command_line()}"
        if error.repeats:
            advice = "the same command would come to it again: try a lower --learning-rate under another --run-name"
        print(f"{name}: stopped: {one_line(error)}; {advice}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a path that cannot be read or written; the text names it
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        return 143 if isinstance(stop, Terminated) else 130
    return 0


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is."""


def _terminated(*_):
    raise Terminated
