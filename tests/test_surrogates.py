"""The clip's siblings, and what moves sigma."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import TINY, contents, interrupted, refused, train
from hypothesis import given
from hypothesis import strategies as st
from test_equations import CATEGORICAL, GAUSSIAN, STATE_STD, default_args, make_batch, make_nets
from torch.distributions import kl_divergence

import common
import ppo

PENDULUM = ["--env-id", "Pendulum-v1", "--total-timesteps", 1024]


def gradient(objective, log_ratio):
    """d objective / d log r, at a log-ratio."""
    leaf = torch.tensor([log_ratio], requires_grad=True)
    objective(leaf).sum().backward()
    return leaf.grad.item()


@given(st.floats(-5, 5), st.floats(-10, 10), st.floats(0.01, 0.9))
def test_the_clip_is_a_penalty_of_the_kl(log_ratio, advantage, eps):
    """Its gradient is that of r A - beta_t (-log r), beta_t = -r A held constant where the clip holds, else 0."""
    ratio, advantages = math.exp(log_ratio), torch.tensor([advantage])
    clip_holds = ratio > 1 + eps if advantage > 0 else ratio < 1 - eps
    beta = -ratio * advantage if clip_holds else 0.0
    clipped = gradient(lambda x: ppo.clipped_surrogate(x.exp(), advantages, eps), log_ratio)
    penalised = gradient(lambda x: x.exp() * advantages - beta * -x, log_ratio)
    assert clipped == pytest.approx(penalised, abs=1e-3 if abs(ratio - 1 - eps) * abs(ratio - 1 + eps) else 100)


@pytest.mark.parametrize("objective", ["none", "kl-fixed"])
@pytest.mark.parametrize(("ratio", "advantage"), [(3.0, 2.0), (0.1, -2.0), (1.0, 1.0)])
def test_without_the_clip_every_sample_counts(objective, ratio, advantage):
    nets = make_nets(CATEGORICAL)
    obs, actions, *_ = make_batch(nets, 1)
    dist, values = nets(obs)
    logp_old = dist.log_prob(actions).detach() - math.log(ratio)
    ppo_loss = ppo.ppo_loss(
        dist, values, actions, logp_old, torch.tensor([advantage]), values.detach(),
        clip_eps=0.2, vf_coef=0.0, ent_coef=0.0, norm_adv=False, objective=objective,
    )  # fmt: skip
    assert ppo_loss[0].item() == pytest.approx(-ratio * advantage, rel=1e-5)
    clip_frac = ppo_loss[1][ppo.STATS.index("clip_frac")].item()
    assert clip_frac == (abs(ratio - 1) > 0.2)


def kl_by_hand(config, old, new, obs):
    """Mean KL(old || new) over obs, term by term."""
    if config["actor"] == "categorical":
        p, q = (actor.net(obs).log_softmax(-1) for actor in (old, new))
        return (p.exp() * (p - q)).sum(-1).mean()
    (mu, log_s), (nu, log_t) = (actor.mean_and_log_std(obs) for actor in (old, new))
    return (log_t - log_s + ((2 * log_s).exp() + (mu - nu) ** 2) / (2 * (2 * log_t).exp()) - 0.5).sum(-1).mean()


@pytest.mark.parametrize("config", [CATEGORICAL, GAUSSIAN, STATE_STD])
def test_gradient_of_the_kl_penalty(config):
    """One step's gradient, read off Adam's first moment, against the whole objective written out."""
    args = default_args("--objective", "kl-fixed", "--kl-beta", "3", "--max-grad-norm", "1e9")
    nets = make_nets(config)
    old, learner = copy.deepcopy(nets), ppo.make_learner(nets, args)
    batch = make_batch(nets, 32)
    with torch.no_grad():
        learner["theta"] += 0.05 * torch.randn_like(learner["theta"])
    new = copy.deepcopy(nets)
    ppo.make_minibatch_steps(nets, args)(*learner.values(), torch.arange(32)[None], *batch)

    obs, actions, logp_old, advantages, returns = batch
    dist, scaled = new.actor(obs), (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    loss = -((dist.log_prob(actions) - logp_old).exp() * scaled).mean() + 3 * kl_by_hand(
        config, old.actor, new.actor, obs
    )
    loss = loss + 0.5 * ((new.critic(obs) - returns) ** 2).mean() - 0.01 * dist.entropy().mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(new.parameters()))])
    torch.testing.assert_close(learner["m"] / 0.1, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.0, 0.5), (0.0066, 0.5), (0.0067, 1.0), (0.01, 1.0), (0.0149, 1.0), (0.0151, 2.0), (math.inf, 2.0)],
)
def test_adapted_beta(kl, expected):
    assert ppo.adapted_beta(1.0, kl, target=0.01) == expected


def test_adapted_ent_coef():
    """One step of gradient descent on log c_e of c_e (H - target), as if c_e itself stood for 1."""
    assert ppo.adapted_ent_coef(0.01, 1.0, target=1.0, rate=0.3) == 0.01
    assert ppo.adapted_ent_coef(0.01, 2.0, target=1.0, rate=0.3) == pytest.approx(0.01 * math.exp(-0.3))
    assert ppo.adapted_ent_coef(0.01, 0.0, target=1.0, rate=0.3) == pytest.approx(0.01 * math.exp(0.3))


def test_what_is_adapted_stays_where_it_can_come_back():
    assert ppo.adapted_beta(1e-9, 0.0, target=0.01) == 1e-9 and ppo.adapted_beta(1e9, 1.0, target=0.01) == 1e9
    assert ppo.adapted_ent_coef(1e-5, 9.0, target=0.0, rate=1.0) == 1e-5
    assert ppo.adapted_ent_coef(9.0, 0.0, target=9.0, rate=1.0) == 10.0


def column(run, name):
    return [float(row[name]) for row in common.read_csv(run / "metrics.csv")]


@pytest.mark.parametrize(
    "argv",
    [
        ("--objective", "kl-adaptive", "--kl-target", "1e-5", "--kl-beta", "0.5", "--target-entropy", "-1"),
        ("--objective", "none", "--std", "state", "--ent-coef-final", "0", "--log-std-init", "-0.5"),
    ],
)
def test_same_bits_for_any_workers_and_after_a_stop(tmp_path, monkeypatch, argv):
    whole = contents(train(tmp_path, "whole", "--workers", 1, *PENDULUM, *argv), evals=False)
    assert contents(train(tmp_path, "two", "--workers", 2, *PENDULUM, *argv), evals=False) == whole
    interrupted(monkeypatch, 2, tmp_path, "stopped", *PENDULUM, *argv)
    assert contents(train(tmp_path, "stopped", *PENDULUM, *argv), evals=False) == whole


def test_beta_and_ent_coef_follow_their_rules(tmp_path):
    argv = ("--objective", "kl-adaptive", "--kl-target", "3e-4", "--target-entropy", "-1")
    run = train(tmp_path, "r", *PENDULUM, *argv)
    beta, kl, ent_coef = (column(run, name) for name in ("kl_beta", "exact_kl", "ent_coef"))
    assert beta[0] == 1 and ent_coef[0] == pytest.approx(0.01)
    for i in range(3):
        assert beta[i + 1] == ppo.adapted_beta(beta[i], kl[i], 3e-4)
        rate = 3e-4 * 10  # gradient steps an update
        assert ent_coef[i + 1] == pytest.approx(ent_coef[i] * math.exp(rate * (-1 - column(run, "entropy")[i])))


def test_linear_ent_coef(tmp_path):
    run = train(tmp_path, "r", *PENDULUM, "--ent-coef-final", 0)
    assert column(run, "ent_coef") == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert {row["kl_beta"] for row in common.read_csv(run / "metrics.csv")} == {""}


def test_a_large_beta_holds_the_policy_where_it_is(tmp_path):
    def last_kl(*argv):
        return column(train(tmp_path, "r", *PENDULUM, "--overwrite", "--learning-rate", 0.01, *argv), "exact_kl")[-1]

    assert last_kl("--objective", "kl-fixed", "--kl-beta", 1000) < 0.2 * last_kl("--objective", "none")


def test_sigma_of_the_state():
    actor = common.build_actor(STATE_STD, log_std_init=-0.5)
    with torch.no_grad():
        actor.net.layers[-1].weight *= 50
        obs = torch.randn(2, 8)
        dist = actor(obs)
        assert dist.log_prob(torch.zeros(2, 2)).shape == dist.entropy().shape == (2,)
        assert not torch.allclose(dist.stddev[0], dist.stddev[1])
        assert common.build_actor(STATE_STD, log_std_init=-0.5)(obs).stddev.log().mean() == pytest.approx(-0.5, abs=0.1)
        noise = torch.from_numpy(actor.noise(np.random.default_rng(0), 2))
        torch.testing.assert_close(actor.sample(obs, noise), dist.mean + dist.stddev * noise)


def test_a_policy_with_sigma_of_the_state_is_played_from_its_file(tmp_path):
    run = train(tmp_path, "r", *PENDULUM, "--std", "state")
    actor, config = common.load_policy(run / "final.pt")
    assert config["std"] == "state" and "log_std" not in actor.state_dict()
    for deterministic in (True, False):
        assert np.isfinite(common.evaluate(actor, config, [0], deterministic)["return"]).all()
    assert column(run, "action_std")[0] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "argv",
    [
        ("--kl-beta", "1"),
        ("--objective", "none", "--kl-beta", "1"),
        ("--objective", "kl-fixed", "--kl-target", "0.01"),
        ("--target-entropy", "0", "--ent-coef-final", "0"),
        ("--target-entropy", "0", "--ent-coef", "0"),
        ("--std", "state", "--env-id", "CartPole-v1"),
        ("--log-std-init", "-1", "--env-id", "CartPole-v1"),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path, argv):
    code, lines = refused(*TINY, "--runs-dir", tmp_path, *argv)
    assert code == 2 and any(word in lines[-1] for word in argv if word.startswith("--"))
    assert not list(tmp_path.iterdir())


def test_kl_of_a_distribution_with_itself_is_zero():
    for config in (CATEGORICAL, GAUSSIAN, STATE_STD):
        dist = make_nets(config).actor(torch.randn(3, 8))
        assert kl_divergence(dist, dist).abs().max() < 1e-6
