"""Small environments for the tests, some of them faulty on purpose. Used as `tests.envs:<id>`."""

import itertools
import os
from typing import ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

_instances = itertools.count()


class Walk(gym.Env):
    """A random walk in [-1, 1]: move left or right, reward 1 - |x|. `fault` strikes in the 30th step of an episode."""

    observation_space = gym.spaces.Box(-2, 2, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault=None):
        self.fault = fault
        self.drift = next(_instances) + os.getpid() if fault == "random" else 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.x = 0, self.np_random.uniform(-0.5, 0.5)
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        self.x = float(np.clip(self.x + 0.1 * (2 * action - 1) + self.np_random.normal(0, 0.05), -1, 1))
        reward, struck = 1 - abs(self.x), self.t == 30
        if struck and self.fault == "raise":
            raise ValueError("the motor is on fire")
        if struck and self.fault == "reward":
            reward = float("nan")
        obs = self._obs()
        if struck and self.fault == "observation":
            obs[0] = np.inf
        return obs, reward, abs(self.x) == 1, False, {}

    def _obs(self):
        return np.array([self.x, (self.t + self.drift) % 50 / 50], np.float32)


class OddActions(Walk):
    action_space = gym.spaces.Box(0, 5, (2,), np.int32)


class OddObservations(Walk):
    observation_space = gym.spaces.Dict(x=gym.spaces.Box(-1, 1))


class Any(gym.Env):
    """Any pair of spaces. Refuses an action that is not in its space, with its dtype and shape; reuses one array.

    reward: the type of its rewards. limit: the length of an episode, or None for one without an end.
    """

    OBSERVATIONS: ClassVar = {
        "vector": Box(-1, 1, (3,), np.float32),
        "float64": Box(-np.inf, np.inf, (2, 2), np.float64),
        "image": Box(0, 255, (6, 6, 3), np.uint8),
        "scalar": Box(0, 1, (), np.float32),
        "discrete": Discrete(5, start=-2),
    }
    ACTIONS: ClassVar = {
        "discrete": Discrete(3),
        "start": Discrete(3, start=-1),
        "box": Box(-1, 1, (2,), np.float32),
        "wide": Box(0, 1000, (2, 2), np.float64),
        "one-sided": Box(np.array([0, -np.inf]), np.array([np.inf, 0]), dtype=np.float32),
        "infinite": Box(-np.inf, np.inf, (1,), np.float32),
        "huge": Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (1,), np.float32),
        "half": Box(-0.1, 0.1, (1,), np.float16),
        "multidiscrete": MultiDiscrete([3, 2, 4], start=[0, 5, -1]),
        "multidiscrete-2d": MultiDiscrete([[2, 3], [4, 2]]),
        "multibinary": MultiBinary(4),
        "multibinary-2d": MultiBinary((2, 2)),
    }
    REWARDS: ClassVar = {"int": int, "array": np.array, "float64": np.float64, "bool": bool}

    def __init__(self, observation="vector", action="discrete", reward="float64", limit=9):
        self.observation_space, self.action_space = self.OBSERVATIONS[observation], self.ACTIONS[action]
        self.reward, self.limit = self.REWARDS[reward], limit
        discrete = isinstance(self.observation_space, Discrete)
        self.obs = None if discrete else np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        assert np.asarray(action).dtype == self.action_space.dtype and np.shape(action) == self.action_space.shape
        self.t += 1
        return self._obs(), self.reward(self.t % 2), self.t == self.limit, False, {}

    def _obs(self):
        if self.obs is None:
            return self.np_random.integers(-2, 3)
        self.obs[...] = self.np_random.integers(0, 2, self.obs.shape)
        return self.obs


class HangsUp(Walk):
    """Its process goes in the 30th step of an episode."""

    def step(self, action):
        if self.t == 29:
            os._exit(3)
        return super().step(action)


gym.register("Any-v0", Any)
gym.register("HangsUp-v0", HangsUp, max_episode_steps=40)
gym.register("Walk-v0", Walk, max_episode_steps=40)
for fault in ("raise", "reward", "observation", "random"):
    gym.register(f"Walk-{fault}-v0", Walk, max_episode_steps=40, kwargs={"fault": fault})
gym.register("OddActions-v0", OddActions)
gym.register("OddObservations-v0", OddObservations)
