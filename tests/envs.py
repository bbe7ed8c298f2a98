"""Small environments for the tests, some of them faulty on purpose. Used as `tests.envs:<id>`."""

import itertools
import os

import gymnasium as gym
import numpy as np

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


gym.register("Walk-v0", Walk, max_episode_steps=40)
for fault in ("raise", "reward", "observation", "random"):
    gym.register(f"Walk-{fault}-v0", Walk, max_episode_steps=40, kwargs={"fault": fault})
gym.register("OddActions-v0", OddActions)
gym.register("OddObservations-v0", OddObservations)
