"""Proximal policy optimisation (PPO), following the page section by section.

    python ppo.py --seed 0                 # LunarLander-v3, discrete actions, 2M steps
    python ppo.py --continuous --seed 0    # the same with a Gaussian actor, 1M steps

Where the page's equations are:

    (2)  importance ratio r = pi_theta / pi_old ......... ppo_loss
    (4)  clipped surrogate L^CLIP ....................... clipped_surrogate
    (5)  the full loss .................................. ppo_loss
    (6)  k1, k2, k3 estimates of the KL ................. kl_estimates
    GAE  generalised advantage estimation ............... compute_gae
    3.4  the training loop .............................. train; in it (a) rollout: collect, (b) GAE: compute_gae,
         (c) epochs of minibatches: make_minibatch_steps
    3.5  inference ...................................... common.play, common.evaluate
    4.3  explained variance ............................. common.explained_variance

Names: N = num_envs, T = num_steps, K = update_epochs. Tensors of a rollout are [T, N, ...] and
flattened to [T*N, ...] for the update; a quantity per sample is 1-D.
"""

import argparse
import functools
import math
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.distributions import kl_divergence
from torch.func import functional_call, grad_and_value

import common

# ---------------------------------------------------------------------------------------------
# The equations
# ---------------------------------------------------------------------------------------------


def compute_gae(rewards, values, dones, last_value, gamma, gae_lambda):
    """GAE(gamma, lambda) over a rollout, and the return targets R = A + V (page section 3).

    rewards, values, dones: [T, N]; last_value: [N], V of the observation after the last row.
    done = terminated OR truncated. The reward of a step that a time limit alone ended already holds
    + gamma * V(final_obs), so done cuts the recursion for both kinds of end, whatever stands
    beyond the cut. Returns (advantages, returns), each [T, N].
    """
    done = dones.bool()
    next_values = torch.cat([values[1:], last_value[None]])
    delta = rewards + gamma * next_values.masked_fill(done, 0) - values  # the TD error
    advantages = torch.empty_like(delta)
    advantage = torch.zeros_like(last_value)
    for t in reversed(range(len(delta))):
        advantage = delta[t] + gamma * gae_lambda * advantage.masked_fill(done[t], 0)
        advantages[t] = advantage
    return advantages, advantages + values


def clipped_surrogate(ratio, advantages, clip_eps):
    """min(r A, clip(r, 1 - eps, 1 + eps) A) per sample: eq. (4) before the mean. All [n]."""
    return torch.min(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)


def kl_estimates(log_ratio):
    """Per-sample estimates k1, k2, k3 of KL(pi_old || pi_theta) from log r (page section 4.1)."""
    k1 = -log_ratio
    k2 = log_ratio**2 / 2
    k3 = (log_ratio.expm1() - log_ratio).clamp(min=0)  # eq. (6); expm1 keeps r - 1 exact near r = 1
    return k1, k2, k3


def normalise(advantages):
    """Zero mean, unit variance within the minibatch (page section 3.1).

    One sample has no spread: it becomes 0 and trains the critic and the entropy alone.
    """
    std = advantages.std(correction=min(1, len(advantages) - 1))
    return (advantages - advantages.mean()) / (std + 1e-8)


KL_OBJECTIVES = ("kl-fixed", "kl-adaptive")  # r A less beta KL, in place of the clip
STATS = ("kl_k1", "kl_k2", "approx_kl", "clip_frac", "entropy", "policy_loss", "value_loss", "grad_norm")


def squared_error(values, returns, advantages, clip_eps=None):
    """(V - R)^2 per sample; with clip_eps, of V and of V held within eps of its old self, the worse. All [n].

    Value clipping is off by default (page section 3.2).
    """
    error = (values - returns) ** 2
    if clip_eps is None:
        return error
    values_old = returns - advantages  # since R = A + V
    clipped = values_old + (values - values_old).clamp(-clip_eps, clip_eps)
    return torch.max(error, (clipped - returns) ** 2)


def ppo_loss(
    dist, values, actions, logp_old, advantages, returns,
    *, clip_eps, vf_coef, ent_coef, norm_adv=True, clip_vloss=False, objective="clip",
):  # fmt: skip
    """The full loss, eq. (5), of one minibatch, and its diagnostics in the order of STATS[:-1].

    dist: a batch of n distributions; values, logp_old, advantages, returns: [n]; actions: [n] or [n, act_dim].
    An objective other than "clip" leaves r A as it is; clip_eps then says what the clip fraction counts.
    """
    log_ratio = dist.log_prob(actions) - logp_old
    ratio = log_ratio.exp()  # eq. (2)
    scaled = normalise(advantages) if norm_adv else advantages
    surrogate = clipped_surrogate(ratio, scaled, clip_eps) if objective == "clip" else ratio * scaled
    policy_loss = -surrogate.mean()  # -L^CLIP, eq. (4)
    value_loss = squared_error(values, returns, advantages, clip_eps if clip_vloss else None).mean()
    entropy = dist.entropy().mean()
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy  # eq. (5)

    k1, k2, k3 = (k.mean() for k in kl_estimates(log_ratio))
    clip_frac = ((ratio - 1).abs() > clip_eps).float().mean()  # page section 4.2
    return loss, torch.stack([k1, k2, k3, clip_frac, entropy, policy_loss, value_loss]).detach()


def adapted_beta(beta, kl, target, least=1e-9, most=1e9):
    """The next update's weight of a KL penalty from this one's KL (Schulman et al. 2017, section 4)."""
    if kl < target / 1.5:
        return max(beta / 2, least)
    return min(beta * 2, most) if kl > target * 1.5 else beta


def adapted_ent_coef(ent_coef, entropy, target, rate, least=1e-5, most=10.0):
    """The next update's c_e: a step of size rate on log c_e, up where the entropy is below its target, else down.

    SAC's rule for its temperature (Haarnoja et al. 2018, eq. 18). Beyond its bounds the bonus would no longer count, or
    alone, and c_e would take long to come back.
    """
    return min(max(ent_coef * math.exp(rate * (target - entropy)), least), most)


# ---------------------------------------------------------------------------------------------
# One Adam step on each minibatch
# ---------------------------------------------------------------------------------------------

MINIBATCHES_PER_CALL = 4  # calling the compiled function costs a fifth of a step; more take longer to compile


class ActorCritic(nn.Module):
    """Actor and critic side by side; they share no weights."""

    def __init__(self, actor, critic):
        super().__init__()
        self.actor, self.critic = actor, critic

    def forward(self, obs):
        return self.actor(obs), self.critic(obs)


def flatten(module):
    """One vector theta of all the module's parameters, which become views of it: writing theta moves them."""
    theta = nn.utils.parameters_to_vector(module.parameters()).detach()
    for param, part in zip(module.parameters(), theta.split([p.numel() for p in module.parameters()]), strict=True):
        param.data = part.view_as(param)
    return theta


def unflatten(theta, module):
    """theta cut into {name: parameter}, differentiably."""
    names, params = zip(*module.named_parameters(), strict=True)
    parts = theta.split([p.numel() for p in params])
    return {name: part.view_as(p) for name, part, p in zip(names, parts, params, strict=True)}


def make_learner(nets, args):
    """minibatch_steps' first arguments: theta, of which the nets are views; Adam's m, v, powers and step size;
    and what may change between updates: the loss's weights, and theta_old, for a KL penalty."""
    theta = flatten(nets)
    return {
        "theta": theta,
        "m": torch.zeros_like(theta),
        "v": torch.zeros_like(theta),
        "powers": torch.ones(2, dtype=torch.float64),
        "learning_rate": torch.tensor(args.learning_rate, dtype=torch.float64),
        "ent_coef": torch.tensor(args.ent_coef),
        "kl_beta": torch.tensor(args.kl_beta),
        "theta_old": theta.clone(),
    }


def prepare(learner, args, progress):
    """Before an update: pi_old, and what follows a schedule. progress: the share of the budget that is spent."""
    learner["theta_old"].copy_(learner["theta"])
    if args.anneal_lr:
        learner["learning_rate"].fill_(args.learning_rate * (1 - progress))
    if args.ent_coef_final is not None:
        learner["ent_coef"].fill_(args.ent_coef + (args.ent_coef_final - args.ent_coef) * progress)


def adapt(learner, args, row, steps):
    """After an update of so many gradient steps: what its measurements, a row of metrics.csv, change for the next."""
    if args.objective == "kl-adaptive":
        learner["kl_beta"].fill_(adapted_beta(row["kl_beta"], row["exact_kl"], args.kl_target))
    if args.target_entropy is not None:
        rate = args.learning_rate * steps
        learner["ent_coef"].fill_(adapted_ent_coef(row["ent_coef"], row["entropy"], args.target_entropy, rate))


def clip_norm(grad, max_norm):
    """The gradient scaled down to at most max_norm, over actor and critic together; and its norm before."""
    norm = grad.norm()
    return grad * (max_norm / (norm + 1e-6)).clamp(max=1), norm


def adam_(theta, m, v, powers, grad, learning_rate, eps, beta1=0.9, beta2=0.999):
    """Adam on the flat parameter vector, in place (Kingma & Ba 2015, algorithm 1).

    powers: [2] float64, beta1^t and beta2^t as running products; to raise them anew costs a tenth of a gradient step.
    """
    powers *= torch.tensor([beta1, beta2], dtype=powers.dtype)
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    m_hat = m / (1 - powers[0])
    v_hat = v / (1 - powers[1])
    theta -= learning_rate * m_hat / (v_hat.sqrt() + eps)


def minibatches(rng, batch_size, size):
    """One epoch of shuffled minibatches, as index tensors [n, size] with n to a call of the compiled function.

    What is left over makes a smaller one at the end.
    """
    order = torch.from_numpy(rng.permutation(batch_size))
    whole = batch_size - batch_size % size
    yield from order[:whole].view(-1, size).split(MINIBATCHES_PER_CALL)
    if whole < batch_size:
        yield order[None, whole:]


def make_minibatch_steps(nets, args):
    """minibatch_steps(*learner's values, idx, obs, actions, logp_old, advantages, returns) -> [n, len(STATS)].

    Takes each row of idx, [n, minibatch_size] indices into the flattened rollout, through loss, gradient, clip
    and Adam. It moves theta, and so the nets, in place.
    """

    options = {k: getattr(args, k) for k in ("clip_eps", "vf_coef", "norm_adv", "clip_vloss", "objective")}

    def loss_of(theta, theta_old, ent_coef, kl_beta, obs, *batch):
        dist, values = functional_call(nets, unflatten(theta, nets), obs)
        loss, stats = ppo_loss(dist, values, *batch, ent_coef=ent_coef, **options)
        if args.objective in KL_OBJECTIVES:
            dist_old, _ = functional_call(nets, unflatten(theta_old, nets), obs)
            loss = loss + kl_beta * kl_divergence(dist_old, dist).mean()  # Schulman et al. 2017, eq. (8)
        return loss, stats

    def minibatch_steps(theta, m, v, powers, learning_rate, ent_coef, kl_beta, theta_old, idx, *rollout):
        stats = []
        for rows in idx:
            batch = [x[rows] for x in rollout]
            grad_of = grad_and_value(loss_of, has_aux=True)
            grad, (_, loss_stats) = grad_of(theta, theta_old, ent_coef, kl_beta, *batch)
            grad, grad_norm = clip_norm(grad, args.max_grad_norm)
            adam_(theta, m, v, powers, grad, learning_rate, args.adam_eps)
            stats.append(torch.cat([loss_stats, grad_norm[None]]))
        return torch.stack(stats)

    return minibatch_steps


def compile_steps(minibatch_steps, shapes, learner, rollout):
    """The steps as one native function, compiled for each shape of idx; the plain one where that fails.

    Only the shape of idx changes between calls, so only that is checked on each call.
    """
    torch.compiler.reset()  # unguarded, what an earlier run in this process compiled would be taken for ours
    options = {"cpp_wrapper": True, "guard_filter_fn": lambda guards: [guard.name == "idx" for guard in guards]}
    compiled = torch.compile(minibatch_steps, fullgraph=True, dynamic=False, options=options)

    def trial(steps, shape):
        steps(*(x.clone() for x in learner.values()), torch.zeros(shape, dtype=torch.int64), *rollout)

    trial(minibatch_steps, (1, 1))  # kl_divergence searches for its formula once, which cannot be compiled
    try:
        for shape in shapes:
            trial(compiled, shape)
    except Exception as error:
        reason = common.first_line(error)
        print(f"the update could not be compiled and runs several times slower: {reason}", file=sys.stderr)
        return minibatch_steps
    return compiled


# ---------------------------------------------------------------------------------------------
# Page 3.4 (a): the rollout
# ---------------------------------------------------------------------------------------------


def collect(envs, weights, update, num_steps):
    """T steps of one worker's n environments under pi_old.

    Returns (obs, actions, rewards, terminated, truncated, next_obs), each [T, n, ...] and next_obs [n, obs_dim], and
    the final observations [(t, environment, obs)] of the episodes that a time limit alone cut.

    V, log pi and the time-limit bootstrap need no environment; `train` computes them afterwards for
    the whole rollout at once, since pi_old does not move meanwhile.
    """
    actor = common.as_numpy(common.load_weights(envs.actor, weights))
    own = slice(envs.rows.start, envs.rows.stop)
    noise = np.zeros((num_steps, envs.num_envs, actor.noise_dim), dtype=np.float32)
    for i in envs.rows:
        noise[:, i] = actor.noise(common.stream("actions", envs.seed, i, update), num_steps)
    obs, actions, rewards, terminated, truncated, final_obs = [], [], [], [], [], []
    for t in range(num_steps):
        action = actor.sample(envs.obs, noise[t])[own]
        obs.append(envs.current)
        actions.append(action)
        reward, term, trunc, cut = envs.step(action)
        rewards.append(reward)
        terminated.append(term)
        truncated.append(trunc)
        final_obs += [(t, envs.rows[row], last) for row, last in cut]
    arrays = [np.array(x) for x in (obs, actions, rewards, terminated, truncated)]
    return (*arrays, envs.current), final_obs


def rollout(shares):
    """The workers' shares side by side: obs, actions, rewards, terminated, truncated [T, N, ...],
    next_obs [N, obs_dim], and the final observations [(t, i, obs)] of the episodes cut by a time limit."""
    arrays, final_obs = zip(*shares, strict=True)
    *buffers, next_obs = zip(*arrays, strict=True)
    buffers = [torch.from_numpy(np.concatenate(parts, axis=1)) for parts in buffers]
    cut = sorted((c for share in final_obs for c in share), key=lambda c: c[:2])
    return *buffers, torch.from_numpy(np.concatenate(next_obs)), cut


# ---------------------------------------------------------------------------------------------
# Page 3.4: the training loop
# ---------------------------------------------------------------------------------------------


def train(args):
    """Train one run, or take up an unfinished one, and return its folder (a Path)."""
    torch.set_num_threads(1)
    config = common.config_of(args)
    run = common.Run(args, config, defaults=parse_args([]))
    if run.finished:
        print(f"{run.path} has finished already; --overwrite starts it over")
        return run.path

    torch.manual_seed(args.seed)
    actor = common.build_actor(config, ortho_init=args.ortho_init, log_std_init=args.log_std_init)
    nets = ActorCritic(actor, common.build_critic(config, args.ortho_init))
    learner = make_learner(nets, args)
    reward_scale = common.RewardScale(args.num_envs, args.gamma)
    saved = {**learner, **dict(nets.named_buffers()), **dict(reward_scale.named_buffers())}
    run.restore(saved)
    with common.Workers(args.workers, config, args.seed, args.num_envs) as workers, run:
        run.begin_environments(workers)
        batch_size = args.num_envs * args.num_steps
        minibatch_steps = make_minibatch_steps(nets, args)
        if args.compile:
            run.progress.say("compiling the gradient step, about 25 s the first time on a machine")
            epoch = minibatches(np.random.default_rng(0), batch_size, args.minibatch_size)
            shapes = {idx.shape for idx in epoch}
            plain = minibatch_steps
            minibatch_steps = compile_steps(plain, shapes, learner, example_rollout(config, batch_size))
            run.note_compiled(minibatch_steps is not plain)

        while run.env_steps < args.total_timesteps:
            clock = [time.monotonic()]

            # (a) rollout with gradients off: this freezes pi_old = pi_theta
            weights = common.actor_weights(nets.actor)
            run.save_snapshots(weights)
            workers.start(collect, weights, run.update, args.num_steps)
            obs, actions, rewards, terminated, truncated, next_obs, cut = rollout(workers.results())
            dones = terminated | truncated
            run.episodes.add(rewards.numpy(), dones.numpy(), actions.numpy(), next_obs.numpy())
            clock.append(time.monotonic())
            if run.evaluation_due():  # of pi_old, by the workers while this process updates
                common.start_evaluation(workers, weights, common.EVAL_SEEDS)

            with torch.no_grad():
                dist_old, values = nets(obs)
                logp_old = dist_old.log_prob(actions)
                if args.norm_reward:
                    rewards = reward_scale(rewards, dones)
                rewards = rewards.float()
                if cut:  # r[trunc & ~term] += gamma * V(final_obs): the time limit is not the task's end
                    t, i, final_obs = zip(*cut, strict=True)
                    rewards[t, i] += args.gamma * nets.critic(torch.from_numpy(np.stack(final_obs)))

                # (b) GAE once over the whole [T, N] buffer
                advantages, returns = compute_gae(
                    rewards, values, dones, nets.critic(next_obs), args.gamma, args.gae_lambda
                )
                explained_variance = common.explained_variance(values.flatten(), returns.flatten())

                # (c) K epochs of shuffled minibatches on the same data
                prepare(learner, args, progress=run.env_steps / args.total_timesteps)
                batch = [x.flatten(0, 1) for x in (obs, actions, logp_old, advantages, returns)]
                rng = common.stream("minibatches", args.seed, run.update)
                epochs = []
                for _ in range(args.update_epochs):
                    calls = minibatches(rng, batch_size, args.minibatch_size)  # each moves theta, hence the nets
                    stats = [minibatch_steps(*learner.values(), idx, *batch) for idx in calls]
                    epochs.append(torch.cat(stats).double())
                    if args.target_kl and epochs[-1][:, STATS.index("approx_kl")].mean() > args.target_kl:
                        break
                stats = torch.cat(epochs)
                exact_kl = kl_divergence(dist_old, nets.actor(obs)).mean()
                check_finite(stats, learner["theta"], exact_kl)
                if args.norm_obs:  # between rollouts, so that pi_old acts and learns on the same inputs
                    for net in (nets.actor.net, nets.critic.net):
                        net.norm.update(obs.flatten(0, 1))
            clock.append(time.monotonic())

            if run.evaluation_due():
                run.log_evaluation(common.finish_evaluation(workers), weights)
            clock.append(time.monotonic())
            row = dict(zip(STATS, stats.mean(0).tolist(), strict=True))
            row["approx_kl_last_epoch"] = epochs[-1][:, STATS.index("approx_kl")].mean().item()
            row |= {"exact_kl": exact_kl.item(), "explained_variance": explained_variance}
            row |= {name: learner[name].item() for name in ("learning_rate", "ent_coef")}
            row["kl_beta"] = learner["kl_beta"].item() if args.objective in KL_OBJECTIVES else None
            row["action_std"] = common.mean_std(nets.actor, obs) if config["actor"] == "gaussian" else None
            adapt(learner, args, row, len(stats))
            run.log_update(row, len(stats), clock)
            run.save_checkpoint(saved)

        run.save_checkpoint(saved, now=True)
        run.finish(workers, common.actor_weights(nets.actor))
    return run.path


def example_rollout(config, n):
    """Tensors like a flattened rollout's: obs, actions, logp_old, advantages, returns."""
    actions = {
        "categorical": lambda: torch.zeros(n, dtype=torch.int64),
        "multicategorical": lambda: torch.zeros(n, len(config["act_dim"]), dtype=torch.int64),
        "gaussian": lambda: torch.zeros(n, config["act_dim"]),
    }[config["actor"]]()
    return torch.zeros(n, config["obs_dim"]), actions, torch.zeros(n), torch.zeros(n), torch.zeros(n)


def check_finite(stats, theta, exact_kl):
    """Stop before what a NaN or infinity has spoilt reaches a file. stats: [steps, len(STATS)]; theta: [P]."""
    bad = (~stats.isfinite()).nonzero()
    if len(bad):
        first, which = bad[0].tolist()
        raise common.RunError(
            f"{STATS[which]} is {stats[first, which].item()} at gradient step {first + 1} of this update", repeats=True
        )
    if not theta.isfinite().all():
        raise common.RunError("a weight is not finite after this update", repeats=True)
    if not exact_kl.isfinite():
        raise common.RunError(f"exact_kl is {exact_kl.item()} after this update", repeats=True)


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="ppo.py",
        usage="python ppo.py [--seed INT] [--continuous] [any of the options below]",
        description="Train PPO on a Gymnasium environment. The same command resumes a run that was stopped.",
        epilog="Box actions: a Gaussian's [-1, 1] is laid over a dimension's bounds; one without bounds, or wider than "
        "a million, takes the action as it is. The environment's copy is clipped to whatever bounds there are.",
        allow_abbrev=False,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=32, width=110),
    )

    def add(group, flag, default, text, kind=int, low=None, high=None, letter=""):
        kind = common.number(kind, low, high) if low is not None else kind
        group.add_argument(
            flag,
            type=kind,
            default=default,
            metavar=kind.__name__.upper(),
            help=f"{letter and letter + ': '}{text} [{default}]",
        )

    group = parser.add_argument_group("run")
    add(group, "--seed", 0, "seeds weights, environments, actions and minibatches", low=0, high=2**32 - 1)
    add(group, "--env-id", "LunarLander-v3", "a registered Gymnasium environment", str)
    group.add_argument(
        "--continuous", action="store_true", help="the environment's variant with continuous actions, Gaussian actor"
    )
    group.add_argument(
        "--env-kwargs",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="keywords of the environment, such as gravity=-5.0 enable_wind=true",
    )
    group.add_argument(
        "--total-timesteps",
        type=common.number(int, 1),
        metavar="INT",
        help="budget in environment steps; whole rollouts, so the last may run past it "
        "[2000000; 1000000 for continuous actions]",
    )
    add(group, "--eval-every", 25_000, "steps between evaluations on 10 held-out seeds; 0: none", low=0)

    group = parser.add_argument_group("algorithm (default and letter as on the page)")
    add(group, "--num-envs", 16, "environments", low=1, high=2**16, letter="N")
    add(group, "--num-steps", 1024, "steps of each environment per rollout", low=1, letter="T")
    add(group, "--update-epochs", 4, "passes over a rollout", low=1, letter="K")
    add(group, "--minibatch-size", 64, "samples per gradient step; what is left over makes a smaller one", low=2)
    add(group, "--gamma", 0.999, "discount", float, 0, 1, "gamma")
    add(group, "--gae-lambda", 0.98, "GAE's decay", float, 0, 1, "lambda")
    add(group, "--clip-eps", 0.2, "half-width of the clip", float, 0, letter="eps")
    add(group, "--vf-coef", 0.5, "weight of the value loss", float, 0, letter="c_v")
    add(group, "--ent-coef", 0.01, "weight of the entropy bonus", float, 0, letter="c_e")
    add(group, "--learning-rate", 3e-4, "Adam's step size", float, 0)
    add(group, "--adam-eps", 1e-5, "Adam's epsilon", float, 1e-12)
    add(group, "--max-grad-norm", 0.5, "gradient clip, actor and critic together", float, 1e-6)
    group.add_argument(
        "--hidden",
        type=common.number(int, 1),
        nargs="+",
        default=[64, 64],
        metavar="INT",
        help="sizes of the hidden layers, of actor and critic alike [64 64]",
    )

    group = parser.add_argument_group("for harder tasks (off unless given)")
    for flag, text in (
        ("--norm-obs", "centre and scale observations by running statistics, clip at 10 (Andrychowicz et al. 2021)"),
        ("--norm-reward", "divide rewards by the running deviation of their discounted sum (Engstrom et al. 2020)"),
        ("--clip-vloss", "clip the value like the policy, by the same eps (page 3.2; Schulman's own code)"),
        ("--anneal-lr", "lower the learning rate linearly to 0 over the budget (Schulman et al. 2017)"),
    ):
        group.add_argument(flag, action="store_true", help=text)
    group.add_argument(
        "--target-kl",
        type=common.number(float, 1e-9),
        metavar="FLOAT",
        help="leave out an update's remaining epochs after one whose mean k3 exceeds this (Spinning Up)",
    )
    group.add_argument(
        "--activation",
        choices=("tanh", "relu"),
        default="tanh",
        help="between layers (Andrychowicz et al. 2021 compare them) [tanh]",
    )
    add(group, "--log-std-init", 0.0, "log sigma of a Gaussian actor at the start, page 7", float, -10, 2)
    for flag, text in (
        ("--no-norm-adv", "leave advantages as they are (page 3.1)"),
        ("--no-ortho-init", "PyTorch's initial weights (page 3.4; Engstrom et al. 2020)"),
    ):
        group.add_argument(flag, dest=flag[5:].replace("-", "_"), action="store_false", help=text)

    group = parser.add_argument_group("other surrogates, and sigma (off unless given)")
    group.add_argument(
        "--objective",
        choices=("clip", "none", *KL_OBJECTIVES),
        default="clip",
        help="clip, eq. (4); none: r A alone, eq. (2); r A - beta KL with a fixed or an adaptive beta "
        "(Schulman et al. 2017, section 4) [clip]",
    )
    for flag, low, text in (
        ("--kl-beta", 0, "beta, or where an adaptive one begins [1]"),
        ("--kl-target", 1e-9, "KL of an update that leaves an adaptive beta alone, nats [0.01]"),
        ("--ent-coef-final", 0, "c_e at the end of the budget, linearly from --ent-coef (page 8)"),
        ("--target-entropy", -1e6, "nats that c_e is adapted to, from --ent-coef (Haarnoja et al. 2018; page 8)"),
    ):
        group.add_argument(flag, type=common.number(float, low), metavar="FLOAT", help=text)
    group.add_argument(
        "--std",
        choices=("global", "state"),
        default="global",
        help="a Gaussian actor's sigma: learned numbers, page 7, or a second head of the network (page 8) [global]",
    )

    group = parser.add_argument_group("machine")
    group.add_argument(
        "--workers",
        type=common.number(int, 1, 256),
        metavar="INT",
        help="rollout processes; any number gives the same results [one per core, at most N]",
    )
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the gradient step; without, each step is slower and agrees to rounding [on]",
    )

    group = parser.add_argument_group("run folder")
    add(group, "--runs-dir", "runs", "where run folders go", str)
    group.add_argument("--run-name", metavar="STR", help="name of the run folder [ppo_<env id>_s<seed>]")
    group.add_argument("--overwrite", action="store_true", help="start over, deleting what the folder holds")

    args = parser.parse_args(argv)
    if args.num_envs * args.num_steps < args.minibatch_size:
        parser.error(
            f"a rollout of {args.num_envs} x {args.num_steps} = {args.num_envs * args.num_steps} samples is smaller "
            f"than --minibatch-size {args.minibatch_size}"
        )
    if args.kl_beta is not None and args.objective not in KL_OBJECTIVES:
        parser.error(f"--kl-beta has no meaning for --objective {args.objective}")
    if args.kl_target is not None and args.objective != "kl-adaptive":
        parser.error(f"--kl-target has no meaning for --objective {args.objective}")
    if args.target_entropy is not None and (args.ent_coef_final is not None or not args.ent_coef):
        parser.error("--target-entropy adapts a positive --ent-coef, without --ent-coef-final")
    args.kl_beta = 1.0 if args.kl_beta is None else args.kl_beta
    args.kl_target = 0.01 if args.kl_target is None else args.kl_target
    try:
        args.env_kwargs = common.env_kwargs(args.env_kwargs)
    except common.UsageError as error:
        parser.error(str(error))
    args.workers = min(args.workers or common.available_cores(), args.num_envs)
    return args


def main(argv=None):
    return common.run_script("ppo.py", lambda: train(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
