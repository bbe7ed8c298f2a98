"""Any Gymnasium environment: its spaces, its time limits, and what harder tasks need."""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

import common
import ppo
from tests.envs import Any
from tests.helpers import contents, interrupted, train

ENV = ["--env-id", "tests.envs:Any-v0"]


@pytest.mark.parametrize(
    "kwargs",
    [
        *(f"observation={name}" for name in Any.OBSERVATIONS),
        *(f"action={name}" for name in Any.ACTIONS),
        *(f"reward={name}" for name in Any.REWARDS),
        "limit=1",
    ],
)
def test_every_space_trains_and_is_played_both_ways(tmp_path, kwargs):
    """The environment itself refuses an action that is not in its space, with its dtype and shape."""
    run = train(tmp_path, "r", *ENV, "--env-kwargs", kwargs, "--total-timesteps", 256, "--workers", 1)
    actor, config = common.load_policy(run / "final.pt")
    for deterministic in (True, False):
        episodes = common.evaluate(actor, config, range(3), deterministic)
        assert (episodes["length"] == (1 if kwargs == "limit=1" else 9)).all()
    row = common.read_csv(run / "metrics.csv")[0]
    assert all(math.isfinite(float(row[k])) for k in ("exact_kl", "entropy", "value_loss", "train_return_100"))


def test_observations_are_copied_flattened_and_one_hot():
    envs = common.Envs(common.policy_config("tests.envs:Any-v0", env_kwargs={"observation": "image"}), 0, 1, range(1))
    envs.begin([0])
    before = envs.current
    envs.step(np.array([0]))
    assert before.shape == (1, 108) and (before != envs.current).any()
    space = Any.OBSERVATIONS["discrete"]
    assert common.flat_observation(-2, space).tolist() == [1, 0, 0, 0, 0]
    assert common.flat_observation(np.int64(2), space).tolist() == [0, 0, 0, 0, 1]
    with pytest.raises(ValueError, match="3 is not in"):
        common.flat_observation(3, space)


def test_bounds_lie_under_the_gaussians_unit():
    """[-1, 1] spans a dimension with both bounds; others take the action as it is; all are clipped."""
    to_wide = common.action_map(Box(np.array([0.0, -2.0]), np.array([1000.0, 2.0]), dtype=np.float64))
    assert to_wide(np.array([[-1, 0.5], [0, 0], [1, -9]], np.float32)).tolist() == [[0, 1], [500, 0], [1000, -2]]
    to_open = common.action_map(Any.ACTIONS["one-sided"])
    assert to_open(np.array([[-3, -3], [3, 3]], np.float32)).tolist() == [[0, -3], [3, 0]]
    unit = np.array([[0.1, -0.3], [1.7, -2.0]], np.float32)
    assert (common.action_map(Any.ACTIONS["box"])(unit) == unit.clip(-1, 1)).all()
    with pytest.raises(common.RunError, match="action is not finite"):
        to_wide(np.array([[np.nan, 0]], np.float32))


@given(st.sampled_from(sorted(Any.ACTIONS)), st.integers(0, 10**6), st.floats(1e-3, 1e6))
def test_any_sample_becomes_an_action_in_the_space(name, seed, scale):
    space = Any.ACTIONS[name]
    config = common.policy_config("tests.envs:Any-v0", env_kwargs={"action": name})
    actor, rng = common.as_numpy(common.build_actor(config)), np.random.default_rng(seed)
    obs = (rng.normal(size=(4, 3)) * scale).astype(np.float32)
    for actions in (actor.mode(obs), actor.sample(obs, actor.noise(rng, 4) * scale)):
        for action in common.action_map(space)(actions.astype(actions.dtype)):
            assert space.contains(action) and np.asarray(action).dtype == space.dtype


def test_independent_categoricals_sum_over_entries():
    torch.manual_seed(0)
    actor = common.MultiCategoricalActor(3, [3, 2])
    obs = torch.randn(20, 3)
    dist, logits = actor(obs), actor.net(obs)
    first, second = Categorical(logits=logits[:, :3]), Categorical(logits=logits[:, 3:])
    actions = dist.sample()
    assert actions.shape == (20, 2) and actor.mode(obs).shape == (20, 2)
    expected = first.log_prob(actions[:, 0]) + second.log_prob(actions[:, 1])
    torch.testing.assert_close(dist.log_prob(actions), expected)
    torch.testing.assert_close(dist.entropy(), first.entropy() + second.entropy())
    other = common.MultiCategoricalActor(3, [3, 2])
    joint = [(i, j) for i in range(3) for j in range(2)]
    p, q = ([d.log_prob(torch.tensor(a).expand(20, 2)) for a in joint] for d in (dist, other(obs)))
    by_hand = sum(a.exp() * (a - b) for a, b in zip(p, q, strict=True))
    torch.testing.assert_close(kl_divergence(dist, other(obs)), by_hand, atol=1e-6, rtol=1e-4)


def test_an_episode_longer_than_many_rollouts_is_resumed(tmp_path, monkeypatch):
    argv = [*ENV, "--env-kwargs", "limit=1000", "action=multidiscrete", "--total-timesteps", 1024]
    whole = train(tmp_path, "whole", *argv)
    interrupted(monkeypatch, 2, tmp_path, "stopped", *argv)
    assert contents(train(tmp_path, "stopped", *argv), evals=False) == contents(whole, evals=False)
    assert all(row["episodes"] == "0" for row in common.read_csv(whole / "metrics.csv"))


def test_without_a_time_limit_an_evaluation_ends(monkeypatch):
    monkeypatch.setattr(common, "UNLIMITED_STEPS", 20)
    config = common.policy_config("tests.envs:Any-v0", env_kwargs={"limit": None})
    episodes = common.evaluate(common.build_actor(config), config, [0, 1])
    assert episodes["length"].tolist() == [20, 20] and episodes["truncated"].all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 1000))
def test_running_statistics_are_those_of_all_rows(sizes, seed):
    rng, norm = np.random.default_rng(seed), common.Normaliser(3)
    parts = [rng.normal(5, 3, (n, 3)) for n in sizes]
    for part in parts:
        norm.update(torch.from_numpy(part))
    rows = np.concatenate(parts)
    np.testing.assert_allclose(norm.mean, rows.mean(0), atol=1e-9)
    np.testing.assert_allclose(norm.variance, rows.var(0), atol=1e-9)


def test_rewards_are_scaled_as_stable_baselines3_scales_them():
    """At the end of a rollout: VecNormalize counts from 1e-4 and step by step, ours by whole rollouts."""
    from stable_baselines3.common.running_mean_std import RunningMeanStd

    rng, scale = np.random.default_rng(0), common.RewardScale(3, 0.9)
    theirs, sums = RunningMeanStd(shape=()), np.zeros(3)
    for _ in range(2):
        rewards, dones = rng.normal(2, 5, (50, 3)), rng.random((50, 3)) < 0.1
        scaled = scale(torch.from_numpy(rewards), torch.from_numpy(dones))
        for t in range(50):
            sums = sums * 0.9 + rewards[t]
            theirs.update(sums)
            sums[dones[t]] = 0
        np.testing.assert_allclose(scaled, (rewards / np.sqrt(theirs.var)).clip(-10, 10), rtol=1e-4)


SWITCHES = ["--norm-obs", "--norm-reward", "--clip-vloss", "--anneal-lr", "--no-norm-adv", "--no-ortho-init"]
HARDER = [*SWITCHES, "--activation", "relu", "--log-std-init", "-0.5", "--target-kl", "0.5", "--hidden", "16", "8"]
HARDER += ["--env-id", "Pendulum-v1"]


def test_same_bits_with_every_switch_for_any_workers_and_after_a_stop(tmp_path, monkeypatch):
    argv = [*HARDER, "--total-timesteps", 1024, "--eval-every", 512]
    whole = contents(train(tmp_path, "whole", "--workers", 1, *argv))
    assert contents(train(tmp_path, "two", "--workers", 2, *argv)) == whole
    interrupted(monkeypatch, 2, tmp_path, "stopped", *argv)
    assert contents(train(tmp_path, "stopped", *argv)) == whole
    rates = [float(row["learning_rate"]) for row in whole[0]]
    assert rates == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 0.75e-4])
    actor, config = common.load_policy(tmp_path / "whole" / "final.pt")
    assert actor.net.norm.count == 1024 and config["activation"] == "relu" and actor.log_std.item() < -0.3
    assert float(whole[0][-1]["train_return_100"] or -1000) < -100  # the environment's own, not the scaled one


@pytest.mark.parametrize("flag", SWITCHES)
def test_each_switch_changes_the_run(tmp_path, flag):
    argv = ["--env-id", "Pendulum-v1", "--total-timesteps", 512, "--workers", 1]
    assert contents(train(tmp_path, "on", flag, *argv), evals=False) != contents(
        train(tmp_path, "off", *argv), evals=False
    )


def test_target_kl_leaves_out_the_remaining_epochs(tmp_path):
    """Each update's first epoch is beyond the target, and its row says how many steps ran: 5 of 10."""
    run = train(tmp_path, "r", "--env-id", "Pendulum-v1", "--total-timesteps", 512, "--target-kl", 1e-9)
    assert [row["gradient_steps"] for row in common.read_csv(run / "metrics.csv")] == ["5", "10"]


def test_clipped_value_loss_by_hand():
    """eps 0.2, V_old = 1: the worse of (V - R)^2 and (clip(V) - R)^2."""
    returns, advantages = torch.tensor([2.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, -1.0])
    values = torch.tensor([1.5, 0.5, 1.1])
    assert ppo.squared_error(values, returns, advantages).tolist() == pytest.approx([0.25, 2.25, 1.21])
    clipped = ppo.squared_error(values, returns, advantages, 0.2)  # 1.2, 0.8, 1.1
    assert clipped.tolist() == pytest.approx([0.64, 2.25, 1.21])


def test_environment_keywords():
    found = common.env_kwargs(["gravity=-5.5", "enable_wind=true", "name=moon", "size=(1, 2)", "x=none", "y=1e999"])
    assert found == {"gravity": -5.5, "enable_wind": True, "name": "moon", "size": [1, 2], "x": None, "y": "1e999"}
    assert common.make_env("LunarLander-v3", gravity=-5.5).unwrapped.gravity == -5.5
    for word in ("gravity", "=3", "a b=1"):
        with pytest.raises(common.UsageError, match="takes key=value"):
            common.env_kwargs([word])
