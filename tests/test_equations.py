"""The page's equations against hand arithmetic, slow loops and closed forms."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import kl_divergence

import common
import ppo

NET = {"obs_dim": 8, "hidden": [64, 64], "activation": "tanh", "norm_obs": False, "std": "global"}
CATEGORICAL = {"actor": "categorical", "act_dim": 4, **NET}
MULTICATEGORICAL = {"actor": "multicategorical", "act_dim": [3, 2], **NET}
GAUSSIAN = {"actor": "gaussian", "act_dim": 2, **NET}
STATE_STD = GAUSSIAN | {"std": "state"}


def make_nets(config, seed=0):
    torch.manual_seed(seed)
    return ppo.ActorCritic(common.build_actor(config), common.build_critic(config))


def make_batch(nets, n=64, seed=0):
    torch.manual_seed(seed)
    obs = torch.randn(n, 8)
    with torch.no_grad():
        dist = nets.actor(obs)
        actions = dist.sample()
        return obs, actions, dist.log_prob(actions), torch.randn(n) * 10, torch.randn(n) * 10


def default_args(*argv):
    return ppo.parse_args([*argv])


def test_gae_by_hand():
    """gamma 0.5, lambda 0.5. Column 0 ends in its second row, column 1 never."""
    rewards = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    values = torch.tensor([[4.0, 4.0], [2.0, 2.0], [8.0, 8.0]])
    dones = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    advantages, returns = ppo.compute_gae(rewards, values, dones, torch.tensor([2.0, 2.0]), 0.5, 0.5)
    # column 0: 3 + 1 - 8 = -4;  2 - 2 = 0 (cut);       1 + 1 - 4 + 0.25 * 0 = -2
    # column 1: 3 + 1 - 8 = -4;  2 + 4 - 2 - 1 = 3;     1 + 1 - 4 + 0.25 * 3 = -1.25
    assert advantages.tolist() == [[-2.0, -1.25], [0.0, 3.0], [-4.0, -4.0]]
    assert returns.tolist() == [[2.0, 2.75], [2.0, 5.0], [4.0, 4.0]]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_gae_is_the_sum_of_discounted_td_errors(T, N, gamma, lam, seed):
    """Each advantage as its own sum over the rest of the episode, with terminated and truncated kept apart."""
    rng = np.random.default_rng(seed)
    rewards, values, final_values = rng.normal(size=(3, T, N))
    last_value = rng.normal(size=N)
    terminated, truncated = rng.random((2, T, N)) < 0.2
    expected = np.zeros((T, N))
    for i in range(N):
        for start in range(T):
            for t in range(start, T):
                if terminated[t, i]:
                    after = 0.0
                elif truncated[t, i]:
                    after = final_values[t, i]
                else:
                    after = values[t + 1, i] if t + 1 < T else last_value[i]
                td_error = rewards[t, i] + gamma * after - values[t, i]
                expected[start, i] += (gamma * lam) ** (t - start) * td_error
                if terminated[t, i] or truncated[t, i]:
                    break
    bootstrapped = rewards + gamma * final_values * (truncated & ~terminated)
    tensors = [torch.from_numpy(x) for x in (bootstrapped, values, terminated | truncated, last_value)]
    advantages, returns = ppo.compute_gae(*tensors, gamma, lam)
    np.testing.assert_allclose(advantages, expected, atol=1e-9)
    np.testing.assert_allclose(returns, expected + values, atol=1e-9)


def test_gae_does_not_look_beyond_a_cut():
    nan = float("nan")
    rewards, dones = torch.ones(3, 1), torch.tensor([[0.0], [1.0], [1.0]])
    values = torch.tensor([[1.0], [1.0], [nan]])
    advantages, _ = ppo.compute_gae(rewards, values, dones, torch.tensor([nan]), 0.9, 0.9)
    assert advantages[:2].isfinite().all() and advantages[2].isnan()
    advantages, _ = ppo.compute_gae(rewards, torch.ones(3, 1), dones, torch.tensor([nan]), 0.9, 0.9)
    assert advantages.isfinite().all()


def test_infinite_horizon_value():
    """A constant reward of 1 without end is worth 1 / (1 - gamma); the bootstrap keeps it so."""
    values = torch.full((50, 1), 10.0)
    advantages, returns = ppo.compute_gae(torch.ones(50, 1), values, torch.zeros(50, 1), values[0], 0.9, 0.95)
    torch.testing.assert_close(advantages, torch.zeros(50, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(returns, values)


@pytest.mark.parametrize(
    ("advantage", "ratio", "objective", "gradient"),
    [
        (2.0, 0.7, 1.4, 2.0),  # good, already less likely: still pulled back up
        (2.0, 1.1, 2.2, 2.0),
        (2.0, 1.5, 2.4, 0.0),  # good, 20 % more likely already: stop
        (-2.0, 1.5, -3.0, -2.0),  # bad, more likely: pushed down in full
        (-2.0, 0.9, -1.8, -2.0),
        (-2.0, 0.7, -1.6, 0.0),  # bad, 20 % less likely already: stop
        (1.0, 1.5, 1.2, 0.0),  # the worked examples of "PPO, explained"
        (-1.0, 1.5, -1.5, -1.0),
    ],
)
def test_clip_case_by_case(advantage, ratio, objective, gradient):
    r = torch.tensor([ratio], requires_grad=True)
    value = ppo.clipped_surrogate(r, torch.tensor([advantage]), 0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(objective)
    assert r.grad.item() == pytest.approx(gradient)


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=20))
def test_k3_is_never_negative(log_ratios):
    assert (ppo.kl_estimates(torch.tensor(log_ratios))[2] >= 0).all()


@pytest.mark.parametrize("config", [CATEGORICAL, GAUSSIAN])
def test_kl_estimates_against_the_exact_kl(config):
    old, new = make_nets(config).actor, make_nets(config).actor
    with torch.no_grad():
        for param in new.parameters():
            param += 0.02 * torch.randn_like(param)
        obs = torch.randn(1, 8).expand(400_000, 8)
        dist_old, dist_new = old(obs), new(obs)
        actions = dist_old.sample()
        k1, k2, k3 = ppo.kl_estimates(dist_new.log_prob(actions) - dist_old.log_prob(actions))
        exact = kl_divergence(dist_old, dist_new)[0].item()
    for k in (k1, k3):  # unbiased: within five standard errors
        assert abs(k.mean().item() - exact) < 5 * k.std().item() / math.sqrt(len(k))
    assert k2.mean().item() == pytest.approx(exact, rel=0.2)
    assert k3.std() < k1.std()


@pytest.mark.parametrize("config", [CATEGORICAL, GAUSSIAN])
def test_first_minibatch(config):
    """Before any step the ratio is 1, every KL estimate 0, nothing clipped, and the loss is eq. (5) by hand."""
    nets = make_nets(config)
    obs, actions, logp_old, advantages, returns = make_batch(nets)
    dist, values = nets(obs)
    loss, stats = ppo.ppo_loss(
        dist, values, actions, logp_old, advantages, returns, clip_eps=0.2, vf_coef=0.5, ent_coef=0.01
    )
    found = dict(zip(ppo.STATS, stats.tolist(), strict=False))
    for name in ("kl_k1", "kl_k2", "approx_kl"):
        assert found[name] == pytest.approx(0, abs=1e-6)
    assert found["clip_frac"] == 0
    assert found["policy_loss"] == pytest.approx(0, abs=1e-6)  # minus the mean of normalised advantages
    assert loss.item() == pytest.approx(
        0.5 * ((values - returns) ** 2).mean().item() - 0.01 * found["entropy"], rel=1e-5
    )


def test_normalise():
    x = ppo.normalise(torch.tensor([1.0, 2.0, 6.0]))
    std = math.sqrt((4 + 1 + 9) / 2)
    torch.testing.assert_close(x, torch.tensor([-2 / std, -1 / std, 3 / std]))
    assert ppo.normalise(torch.tensor([5.0])).tolist() == [0.0]


def test_categorical_log_prob_entropy_and_mode():
    actor = make_nets(CATEGORICAL).actor
    obs = torch.randn(5, 8)
    logits = actor.net(obs).double()
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    dist = actor(obs)
    torch.testing.assert_close(
        dist.log_prob(torch.tensor([0, 1, 2, 3, 0])).double(), p[range(5), [0, 1, 2, 3, 0]].log()
    )
    torch.testing.assert_close(dist.entropy().double(), -(p * p.log()).sum(-1))
    assert actor.mode(obs).tolist() == p.argmax(-1).tolist()


def test_gaussian_log_prob_and_entropy_are_summed_over_dimensions():
    actor = make_nets(GAUSSIAN).actor
    with torch.no_grad():
        actor.log_std.copy_(torch.tensor([0.3, -0.5]))
    obs, a = torch.randn(5, 8), torch.randn(5, 2)
    sigma, mu = actor.log_std.exp(), actor.mode(obs)
    log_prob = (-0.5 * ((a - mu) / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
    torch.testing.assert_close(actor(obs).log_prob(a), log_prob)
    entropy = (0.5 + 0.5 * math.log(2 * math.pi) + sigma.log()).sum()
    torch.testing.assert_close(actor(obs).entropy(), entropy.expand(5))


@pytest.mark.parametrize("config", [CATEGORICAL, GAUSSIAN])
def test_sample_follows_the_distribution(config):
    actor = make_nets(config, seed=3).actor
    n = 100_000
    with torch.no_grad():
        actor.net.layers[-1].weight *= 50
        obs = torch.randn(1, 8).expand(n, 8)
        actions = actor.sample(obs, torch.from_numpy(actor.noise(np.random.default_rng(0), n)))
        dist = actor(obs[:1])
    if config is CATEGORICAL:
        frequency = torch.bincount(actions, minlength=4) / n
        torch.testing.assert_close(frequency, dist.probs[0], atol=0.01, rtol=0)
    else:
        torch.testing.assert_close(actions.mean(0), dist.mean[0], atol=0.02, rtol=0)
        torch.testing.assert_close(actions.std(0), dist.stddev[0], atol=0.02, rtol=0)


@pytest.mark.parametrize(
    "config", [CATEGORICAL, GAUSSIAN, STATE_STD, CATEGORICAL | {"hidden": [16]}, GAUSSIAN | {"hidden": []}]
)
def test_numpy_copy_is_the_same_actor(config):
    actor = make_nets(config, seed=3).actor
    with torch.no_grad():
        for param in actor.parameters():
            param += 0.3 * torch.randn_like(param)
    copy, obs = common.as_numpy(actor), torch.randn(50, 8)
    noise = actor.noise(np.random.default_rng(0), 50)
    for ours, theirs in (
        (copy.net(obs.numpy()), actor.net(obs)),
        (copy.mode(obs.numpy()), actor.mode(obs)),
        (copy.sample(obs.numpy(), noise), actor.sample(obs, torch.from_numpy(noise))),
    ):
        assert isinstance(ours, np.ndarray) and ours.dtype in (np.float32, np.int64)
        torch.testing.assert_close(torch.from_numpy(ours), theirs.detach())
    assert len(list(actor.parameters())) == 2 * len(actor.net.layers) + ("log_std" in dict(actor.named_parameters()))


def test_parameter_counts_and_initialisation():
    def count(module):
        return sum(p.numel() for p in module.parameters())

    categorical, gaussian, critic = make_nets(CATEGORICAL), make_nets(GAUSSIAN).actor, common.Critic(8)
    assert (count(categorical.actor), count(gaussian), count(critic)) == (4996, 4868, 4801)
    for module, head_gain in ((categorical.actor, 0.01), (critic, 1.0)):
        for layer, gain in (
            (module.net.layers[0], 2**0.5),
            (module.net.layers[1], 2**0.5),
            (module.net.layers[2], head_gain),
        ):
            w = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
            torch.testing.assert_close(w @ w.T, gain**2 * torch.eye(len(w)), atol=1e-5, rtol=0)
            assert not layer.bias.any()


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert common.explained_variance(returns, returns) == 1
    assert common.explained_variance(torch.full((3,), 9.0), returns) == 0
    assert common.explained_variance(-returns, returns) == -3
    assert math.isnan(common.explained_variance(returns, torch.ones(3)))


def test_adam_and_clip_are_torchs():
    torch.manual_seed(0)
    theta = torch.randn(100)
    reference = torch.nn.Parameter(theta.clone())
    adam = torch.optim.Adam([reference], lr=3e-4, eps=1e-5)
    m, v, powers = torch.zeros(100), torch.zeros(100), torch.ones(2, dtype=torch.float64)
    for i in range(20):
        reference.grad = torch.randn(100) * 10 ** (i % 5 - 3)
        grad, norm = ppo.clip_norm(reference.grad.clone(), 0.5)
        assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_([reference], 0.5).item())
        ppo.adam_(theta, m, v, powers, grad, 3e-4, 1e-5)
        adam.step()
    torch.testing.assert_close(theta, reference.detach(), atol=1e-6, rtol=0)


def run_steps(config, compiled=None, n=64):
    nets = make_nets(config)
    learner = ppo.make_learner(nets, default_args())
    batch = make_batch(nets, n)
    steps = ppo.make_minibatch_steps(nets, default_args())
    steps = compiled(steps, learner, batch) if compiled else steps
    stats = [steps(*learner.values(), idx, *batch) for idx in ppo.minibatches(np.random.default_rng(0), n, 32)]
    return nets, learner["theta"], torch.cat(stats), batch


@given(st.integers(2, 300), st.integers(2, 40))
def test_minibatches_hold_every_sample_once(batch_size, size):
    size = min(size, batch_size)
    calls = list(ppo.minibatches(np.random.default_rng(0), batch_size, size))
    assert sorted(torch.cat([idx.flatten() for idx in calls]).tolist()) == list(range(batch_size))
    sizes = [len(rows) for idx in calls for rows in idx]
    assert sizes == [size] * (batch_size // size) + [batch_size % size] * (batch_size % size > 0)


@pytest.mark.slow  # the C++ compiler takes half a minute the first time
@pytest.mark.parametrize("config", [CATEGORICAL, GAUSSIAN])
def test_compiled_equals_uncompiled(config):
    """Also for a left-over minibatch of one sample, which trains without a NaN."""

    def compiled(steps, learner, batch):
        native = ppo.compile_steps(
            steps, {idx.shape for idx in ppo.minibatches(np.random.default_rng(0), 65, 32)}, learner, batch
        )
        assert native is not steps, "no C++ compiler here"
        return native

    _, plain, plain_stats, _ = run_steps(config, n=65)
    _, native, native_stats, _ = run_steps(config, compiled, n=65)
    torch.testing.assert_close(native, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(native_stats, plain_stats, atol=1e-3, rtol=1e-3)
    assert native.isfinite().all() and len(plain_stats) == 3


@pytest.mark.parametrize("continuous", [False, True])
def test_gradient_step_equals_stable_baselines3(continuous):
    """The same weights and the same 64 samples through SB3's update and through ours."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger

    env = common.make_env("LunarLander-v3", continuous)
    sb3 = PPO("MlpPolicy", env, n_steps=64, batch_size=64, n_epochs=1, ent_coef=0.01, device="cpu", seed=0)
    sb3.set_logger(Logger(None, []))
    sb3._current_progress_remaining = 1.0
    nets = make_nets(GAUSSIAN if continuous else CATEGORICAL)
    learner = ppo.make_learner(nets, default_args())

    def pairs():
        policy = sb3.policy
        ours_theirs = (
            (
                nets.actor.net,
                (policy.mlp_extractor.policy_net[0], policy.mlp_extractor.policy_net[2], policy.action_net),
            ),
            (nets.critic.net, (policy.mlp_extractor.value_net[0], policy.mlp_extractor.value_net[2], policy.value_net)),
        )
        for net, layers in ours_theirs:
            for ours, theirs in zip(net.layers, layers, strict=True):
                yield from ((ours.weight, theirs.weight), (ours.bias, theirs.bias))
        if continuous:
            yield nets.actor.log_std, policy.log_std

    with torch.no_grad():
        for ours, theirs in pairs():
            theirs.copy_(ours)
    obs, actions, logp_old, advantages, returns = make_batch(nets)
    logp_old = logp_old + 0.3 * torch.randn(64)  # so that some ratios are clipped
    buffer = sb3.rollout_buffer
    buffer.reset()
    buffer.observations[:, 0], buffer.log_probs[:, 0] = obs.numpy(), logp_old.numpy()
    buffer.actions[:, 0] = actions.reshape(64, -1).numpy()
    buffer.advantages[:, 0], buffer.returns[:, 0] = advantages.numpy(), returns.numpy()
    buffer.full = True
    sb3.train()

    steps = ppo.make_minibatch_steps(nets, default_args())
    (stats,) = steps(*learner.values(), torch.arange(64)[None], obs, actions, logp_old, advantages, returns)
    assert stats[ppo.STATS.index("clip_frac")] > 0.1
    for ours, theirs in pairs():
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_what_is_not_finite_is_named():
    stats, theta = torch.zeros(3, len(ppo.STATS)), torch.zeros(5)
    ppo.check_finite(stats, theta, torch.zeros(()))
    with pytest.raises(common.RunError, match="a weight is not finite"):
        ppo.check_finite(stats, theta / 0, torch.zeros(()))
    with pytest.raises(common.RunError, match="exact_kl is inf"):
        ppo.check_finite(stats, theta, torch.tensor(math.inf))
    stats[1, ppo.STATS.index("grad_norm")] = math.inf
    with pytest.raises(common.RunError, match="grad_norm is inf at gradient step 2"):
        ppo.check_finite(stats, theta, torch.zeros(()))


def test_every_equation_of_the_map_is_tagged():
    source = Path(ppo.__file__).read_text().split('"""', 2)[2]
    for number in (2, 4, 5, 6):
        assert f"eq. ({number})" in source
