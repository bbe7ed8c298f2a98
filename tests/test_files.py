"""Files from a crash or a stranger: one line that names the file, exit code 2, nothing written, no code run."""

import contextlib
import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import FUZZ, WorkersHere, train
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import eval_stochastic
import plot
import record

MAINS = {
    "eval_stochastic.py": lambda folder, out: eval_stochastic.main([str(folder), "--episodes", "2", "--workers", "1"]),
    "plot.py": lambda folder, out: plot.main([str(folder), "--out", str(out)]),
    "plot.py --table": lambda folder, out: plot.main([str(folder), "--table"]),
    "record.py": lambda folder, out: record.main([str(folder), "--out", str(out / "film.mp4")]),
    "record.py --progression": lambda folder, out: record.main(
        [str(folder), "--progression", "--out", str(out / "film.mp4")]
    ),
}


@pytest.fixture(scope="module", autouse=True)
def quick(whole):
    """No processes, few episodes, no film and no drawing: what is read is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "Workers", WorkersHere)
        patch.setattr(common, "FINAL_SEEDS", common.FINAL_SEEDS[:2])
        patch.setattr(common, "VIDEO_SEEDS", common.VIDEO_SEEDS[:2])
        patch.setattr(record, "frames_per_second", lambda config: 30)
        patch.setattr(record, "frames", lambda *_: iter(()))
        patch.setattr(record, "write_film", lambda path, pictures, fps: len(list(pictures)))
        patch.setattr(plot.plt.Figure, "savefig", lambda figure, path, **_: Path(path).write_bytes(b""))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run."""
    root = tmp_path_factory.mktemp("runs")
    run = train(root, "whole", "--env-id", "CartPole-v1", "--total-timesteps", 512, "--eval-every", 256)
    with contextlib.redirect_stdout(io.StringIO()):
        assert MAINS["eval_stochastic.py"](run, root) == 0
    return run


@pytest.fixture
def run(whole, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(whole, tmp_path / "whole")


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def call(name, run, out):
    """(exit code, lines on standard error); nothing is written where it is refused."""
    before, errors = contents(run), io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = MAINS[name](run, out)
    plot.plt.close("all")
    lines = errors.getvalue().splitlines()
    assert code in (0, 2), (code, lines)
    if code == 2:
        assert len(lines) == 1 and name.split()[0] in lines[0], lines
        assert contents(run) == before and not (out.exists() and contents(out))
    return code, lines


def refused_by(run, out, names=tuple(MAINS)):
    """Which of the scripts refuse the run, with their line; each names a file or folder of it."""
    found = {}
    for name in names:
        shutil.rmtree(out, ignore_errors=True)
        code, lines = call(name, run, out)
        if code == 2:
            assert str(run) in lines[0], lines
            found[name] = lines[0]
    return found


def test_the_whole_run_is_taken_by_every_script(run, tmp_path):
    assert refused_by(run, tmp_path / "out") == {}


TEXTS = ("config.json", "result.json", "metrics.csv", "evals.csv", "eval_stochastic.csv")
POLICIES = ("final.pt", "best.pt", "snapshots/050.0.pt")


@st.composite
def damage(draw):
    """(script, file, function of its bytes)."""
    name = draw(st.sampled_from(TEXTS + POLICIES))
    kind = draw(st.sampled_from(("cut", "flip", "replace", "insert")))
    share, garbage = draw(st.floats(0, 1)), draw(st.binary(max_size=20))

    def apply(data):
        at = int(share * (len(data) - 1))
        if kind == "cut":
            return data[:at]
        if kind == "flip":
            return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        return garbage if kind == "replace" else data[:at] + garbage + data[at:]

    return draw(st.sampled_from(list(MAINS))), name, apply


def fuzzed_bytes(run, tmp_path, change):
    script, name, apply = change
    whole = (run / name).read_bytes()
    (run / name).write_bytes(apply(whole))
    try:
        refused_by(run, tmp_path / "out", [script])
    finally:
        (run / name).write_bytes(whole)


VALUES = (
    None,
    True,
    -1,
    0,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    10**400,
    "",
    "x",
    "1",
    "$\\frac$",
    "\x00",
    [],
    [1],
    {},
)


def paths(value, prefix=()):
    """Where a JSON value has values: (key, ..., key)."""
    yield prefix
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from paths(inner, (*prefix, key))


def replaced(value, path, new):
    if not path:
        return new
    return value | {path[0]: replaced(value[path[0]], path[1:], new)}


def fuzzed_values(run, tmp_path, draw):
    name = draw(st.sampled_from(TEXTS))
    text, new = (run / name).read_text(), draw(st.sampled_from(VALUES))
    if name.endswith(".json"):
        value = json.loads(text)
        damaged = json.dumps(replaced(value, draw(st.sampled_from(list(paths(value)))), new))
    else:
        rows = [line.split(",") for line in text.splitlines()]
        row = draw(st.sampled_from(rows))
        row[draw(st.integers(0, len(row) - 1))] = str(new)
        damaged = "\n".join(",".join(row) for row in rows) + "\n"
    (run / name).write_text(damaged)
    try:
        refused_by(run, tmp_path / "out", [draw(st.sampled_from(list(MAINS)))])
    finally:
        (run / name).write_text(text)


@settings(max_examples=40, **FUZZ)
@given(damage())
def test_damaged_bytes(run, tmp_path, change):
    fuzzed_bytes(run, tmp_path, change)


@settings(max_examples=40, **FUZZ)
@given(st.data())
def test_values_of_the_wrong_kind(run, tmp_path, data):
    fuzzed_values(run, tmp_path, data.draw)


@pytest.mark.slow
@settings(max_examples=400, **FUZZ)
@given(damage())
def test_much_damaged_bytes(run, tmp_path, change):
    fuzzed_bytes(run, tmp_path, change)


@pytest.mark.slow
@settings(max_examples=400, **FUZZ)
@given(st.data())
def test_many_values_of_the_wrong_kind(run, tmp_path, data):
    fuzzed_values(run, tmp_path, data.draw)


class Marker:
    """Unpickled, it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def rewritten(path, change):
    """A policy file with its contents changed, and its checksums right."""
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


def test_no_code_from_a_policy_file_runs(run, tmp_path):
    marker = tmp_path / "marker"
    for name in POLICIES:
        rewritten(run / name, lambda saved: saved.update(extra=Marker(marker)))
    assert len(refused_by(run, tmp_path / "out")) == 4 and not marker.exists()  # but for the table
    for name in POLICIES:
        (run / name).write_bytes(pickle.dumps(Marker(marker)))
    assert len(refused_by(run, tmp_path / "out")) == 4 and not marker.exists()


@pytest.mark.parametrize("name", ["final.pt", "config.json"])
def test_no_code_from_beside_a_file_runs(run, tmp_path, monkeypatch, name):
    """An id "module:Id-v0" whose module lies in the folder that was unpacked."""
    (tmp_path / "evil.py").write_text(f"import os; os.mkdir({str(tmp_path / 'marker')!r})")
    monkeypatch.syspath_prepend(str(tmp_path.parent))
    env_id = f"{tmp_path.name}.evil:X-v0"
    if name == "final.pt":
        rewritten(run / name, lambda saved: saved["config"].update(env_id=env_id))
    else:
        config = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(replaced(config, ("args", "env_id"), env_id)))
    assert "eval_stochastic.py" in refused_by(run, tmp_path / "out")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved["actor"]["net.layers.0.bias"].fill_(float("nan")),
        lambda saved: saved["actor"]["net.layers.2.weight"].fill_(float("inf")),
        lambda saved: saved["actor"].pop("net.layers.0.bias"),
        lambda saved: saved["config"].update(env_id="Acrobot-v1"),
        lambda saved: saved["config"].update(env_id="Nowhere-v0"),
        lambda saved: saved["config"].update(hidden=[10**6, 10**6]),
        lambda saved: saved["config"].update(hidden=[64, 65]),
        lambda saved: saved["config"].update(activation="sine"),
        lambda saved: saved["config"].update(env_kwargs={"gravity": 3}),
        lambda saved: saved["config"].update(solved_return=0.0),
        lambda saved: saved.pop("config"),
        lambda saved: saved.update(config=[]),
        lambda saved: saved.update(actor=3),
    ],
)
def test_a_policy_that_is_not_this_runs(run, tmp_path, change):
    for name in ("final.pt", "best.pt"):
        rewritten(run / name, change)
    found = refused_by(run, tmp_path / "out")
    assert "final.pt" in found["eval_stochastic.py"] and "best.pt" in found["record.py"]


@pytest.mark.parametrize("name", [*TEXTS, "final.pt", "snapshots/050.0.pt"])
def test_a_folder_where_a_file_should_be(run, tmp_path, name):
    (run / name).unlink()
    (run / name).mkdir()
    assert refused_by(run, tmp_path / "out")


def test_odd_snapshots(run, tmp_path):
    shutil.copy(run / "snapshots" / "050.0.pt", run / "snapshots" / "half.pt")
    assert set(refused_by(run, tmp_path / "out")) == {"record.py --progression"}
    shutil.rmtree(run / "snapshots")
    (run / "snapshots").write_text("")
    assert set(refused_by(run, tmp_path / "out")) == {"record.py --progression"}


def test_a_zip_that_grows(run, tmp_path):
    """A policy file of few bytes that stands for many is not unpacked into memory whole."""
    with zipfile.ZipFile(run / "final.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", np.zeros(10**7, np.uint8).tobytes())
    assert "eval_stochastic.py" in refused_by(run, tmp_path / "out")


def test_places_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.mp4").mkdir()
    for name, argv in (("plot", ["--out", "file"]), ("plot", ["--out", "file/x"]), ("record", ["--out", "file/x.mp4"])):
        errors = io.StringIO()
        argv = [argv[0], str(tmp_path / argv[1])]
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            assert {"plot": plot, "record": record}[name].main([str(run), *argv]) == 2
        assert len(errors.getvalue().splitlines()) == 1 and str(tmp_path / "file") in errors.getvalue()
    with contextlib.redirect_stderr(errors):
        assert record.main([str(run), "--out", str(tmp_path / "folder.mp4")]) == 2
