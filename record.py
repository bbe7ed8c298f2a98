"""Videos of trained policies, H.264, without a display.

    python record.py runs/ppo_LunarLander-v3_s0                  # the best policy on held-out starts
    python record.py runs/ppo_LunarLander-v3_s0 --progression    # one start, flown by each snapshot in turn
    python record.py runs/ppo_LunarLander-v3_s0 --out best.gif   # a small one for a README

Recording reads policy files and changes nothing in the run.
"""

import argparse
import contextlib
import io
import itertools
import os
import sys
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import common

SIZE = 640, 400  # pixels, width and height
FILMED = 4
GIF_EVERY = 4  # a GIF shows every fourth picture, at half the size


def fly(workers, policy, seeds):
    """The deterministic episodes of a policy (actor, config) from these seeds, as from common.evaluate."""
    return common.evaluate_with(workers, common.actor_weights(policy[0]), seeds)


def choose(episodes, solved_return, count=FILMED):
    """Indices of the episodes to film: failures first, where there are any. Without a threshold, the lowest first."""
    returns = episodes["return"]
    if solved_return is None:
        return np.argsort(returns, kind="stable")[:count].tolist()
    return np.argsort(returns >= solved_return, kind="stable")[:count].tolist()


def frames(policy, seed, title):
    """The pictures of one deterministic episode, [height, width, 3] uint8; seed, return so far and step in each."""
    actor, config = policy
    env = common.make_policys_env(config, render_mode="rgb_array")
    total = 0.0
    try:
        for step, (_, _, reward, _, _) in enumerate(common.play(common.as_numpy(actor), env, seed)):
            total += reward
            yield caption(env.render(), f"{title}   seed {seed}   return {total:7.1f}   step {step + 1}")
    finally:
        env.close()


def caption(picture, text):
    """A picture fitted into SIZE, with a line of text on it."""
    picture = Image.fromarray(picture)
    picture.thumbnail(SIZE)
    canvas = Image.new("RGB", SIZE)
    canvas.paste(picture, ((SIZE[0] - picture.width) // 2, (SIZE[1] - picture.height) // 2))
    font = ImageFont.load_default(15)
    ImageDraw.Draw(canvas).text((10, 8), text, fill="white", font=font, stroke_width=2, stroke_fill="black")
    return np.asarray(canvas)


def write_film(path, pictures, fps):
    """Write an H.264 film or a GIF, under its own name only once it is whole. Returns how many frames it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    options = {"fps": fps, "codec": "libx264", "macro_block_size": 8, "quality": 7}
    if path.suffix == ".gif":
        pictures = map(halved, itertools.islice(pictures, 0, None, GIF_EVERY))
        options = {"duration": 1000 * GIF_EVERY / fps, "loop": 0, "subrectangles": True}
    count = 0
    try:
        with imageio.get_writer(temporary, **options) as film:
            for picture in pictures:
                film.append_data(picture)
                count += 1
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def halved(picture):
    """Half the size, and few colours, so that pictures after one another differ in few places."""
    small = Image.fromarray(picture).resize((SIZE[0] // 2, SIZE[1] // 2), Image.Resampling.BOX)
    return np.asarray(small.quantize(32, dither=Image.Dither.NONE).convert("RGB"))


def frames_per_second(config):
    """The environment's own frame rate. Raises UsageError, after one trial picture, where it cannot be filmed."""
    env_id = config["env_id"]
    env = common.make_policys_env(config)
    modes, fps = env.metadata.get("render_modes") or [], env.metadata.get("render_fps") or 30
    env.close()
    if "rgb_array" not in modes:
        raise common.UsageError(f"{env_id} cannot be filmed: it renders {', '.join(modes) or 'nothing'}, not rgb_array")
    with contextlib.redirect_stderr(io.StringIO()):  # a graphics library that fails may say so in many lines
        try:
            env = common.make_policys_env(config, render_mode="rgb_array")
            env.reset(seed=0)
            caption(env.render(), env_id)
            env.close()
        except Exception as error:
            reason = common.first_line(error)
        else:
            return fps
    raise common.UsageError(f"{env_id} cannot be filmed on this machine: {reason}")


def record_best(run, workers, policy):
    """(pictures, lines to print): the best policy on the video seeds, of which FILMED are filmed."""
    config, seeds = policy[1], common.VIDEO_SEEDS
    with common.playing(run / "best.pt"):
        episodes = fly(workers, policy, seeds)
    found = common.summarise(episodes, config)
    lines = [f"{len(seeds)} held-out starts: return {found['mean_return']:.1f} +- {found['std_return']:.1f}"]
    for field, text in (("solved", f"score at least {config['solved_return'] or 0:g}"), ("landed", "land")):
        if found[field] == found[field]:
            lines.append(f"{round(found[field] * len(seeds))} of {len(seeds)} {text}")
    chosen = choose(episodes, config["solved_return"])
    lines.append("filmed: " + ", ".join(f"seed {seeds[i]} ({episodes['return'][i]:.1f})" for i in chosen))
    return (picture for i in chosen for picture in frames(policy, seeds[i], run.resolve().name)), lines


def record_progression(run, workers, snapshots, seed):
    """(pictures, lines to print): one start, flown by each of the snapshots {percent: policy} in turn."""
    titles, lines = {percent: f"{percent:g} % of training" for percent in snapshots}, []
    for percent, policy in snapshots.items():
        with common.playing(run / "snapshots" / f"{percent:05.1f}.pt"):
            episode = fly(workers, policy, [seed])
        lines.append(f"{titles[percent]:>20}: return {episode['return'][0]:8.1f}, {episode['length'][0]} steps")
    films = (frames(policy, seed, titles[percent]) for percent, policy in snapshots.items())
    return itertools.chain.from_iterable(films), lines


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="record.py", description="Film a run's policies, without a display.")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--progression", action="store_true", help="fly one start with each snapshot instead")
    parser.add_argument(
        "--seed",
        type=common.number(int, 0, 2**32 - 1),
        default=common.VIDEO_SEEDS[0],
        metavar="INT",
        help=f"the start of --progression [{common.VIDEO_SEEDS[0]}]",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the film, .mp4 or .gif [videos/RUN.mp4, videos/RUN-progression.mp4]"
    )
    args = parser.parse_args(argv)
    if args.out and args.out.suffix not in (".mp4", ".gif"):
        parser.error(f"--out {args.out}: a film's name ends in .mp4 or .gif")
    return args


def record(args):
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if sys.platform == "linux" and "DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo would look for a display
    name = args.run.resolve().name + "-progression" * args.progression
    out = args.out or Path("videos", f"{name}.mp4")
    snapshots = common.load_snapshots(args.run) if args.progression else None
    policy = snapshots[min(snapshots)] if snapshots else common.load_runs_policy(args.run, "best.pt")
    config = policy[1]
    common.check_writable(out)
    fps = frames_per_second(config)
    with common.Workers(common.available_cores(), config, 0, common.available_cores()) as workers:
        if args.progression:
            pictures, lines = record_progression(args.run, workers, snapshots, args.seed)
        else:
            pictures, lines = record_best(args.run, workers, policy)
    print("\n".join(lines))
    count = write_film(out, pictures, fps)
    print(f"{out}: {count} frames, {count / fps * (GIF_EVERY if out.suffix == '.gif' else 1):.1f} s")


def main(argv=None):
    return common.run_script("record.py", lambda: record(parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
