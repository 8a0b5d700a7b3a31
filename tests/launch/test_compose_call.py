"""The command line from end to end, up to the moment of submitting."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from composing import ROOT, call, copied_root, overrides, plan

from europa_exp.config.errors import ConfigError
from europa_exp.config.identity import identity
from europa_exp.launch import plugins
from europa_exp.launch.arguments import split_flags
from europa_exp.launch.hand_over import hand_over


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Every call runs in an empty folder, and none may leave anything in it."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def submitted(monkeypatch):
    """What would have been submitted."""
    calls = []

    def submit(points, launch, *, sweep, command):
        calls.append((list(points), sweep))
        return 7

    import europa_exp.launch.submit as module

    monkeypatch.setattr(module, "submit", submit)
    return calls


BAD = {
    "comm=fp9": ["comm=", "bf16, bf16_a2a, fp8, fp8_a2a"],
    "nccl.max_cta=16": ["nccl.max_cta=16", "nccl.max_ctas"],
    "nccl.max_ctas=0": ["nccl.max_ctas=0", "1 to 64"],
    "parallelism.expert_parallel_degree=3": ["parallelism.expert_parallel_degree=3"],
    "training.steps=1e3": ["training.steps='1e3'", "training.steps=1000"],
    "training.seq_len=None": ["training.seq_len=", "whole number"],
    "tracking.notes=None": ["tracking.notes=", "null"],
    "tracking.notes=a,b": ["-m", 'tracking.notes="a,b"'],
    "tracking.notes=a=b": ['tracking.notes="a=b"'],
    "tracking.notes=x#y": ['tracking.notes="x#y"'],
    "nccl.max_ctas=8,16": ["-m"],
    "word": ["field=value"],
    "+tags=[a," + "b" * 65 + "]": ["tags[1]", "65"],
    "nccl.max_ctas=${nowhere}": ["nccl.max_ctas", "${nowhere}", "nowhere"],
    "training.steps=???": ["training.steps", "needs a value"],
    "+training.stepz=3": ["training.stepz", "training.steps"],
    "+nothing=3": ["nothing=3", "no such field"],
    "experiment=ladder/99": ["experiment=", "ladder/00_baseline"],
    "+sweeps=comm_nccl": ["-m", "+sweeps=comm_nccl"],
    "+sweeps=nothing": ["sweeps=", "comm_nccl"],
    "hydra.run.dir=x": ["hydra.run.dir"],
    "hydra/launcher=basic": ["hydra/launcher"],
    "--experimental-rerun=x.pickle": ["--experimental-rerun"],
    "~model": ["model.dim", "model.n_layers"],
    "+=": ["command line='+='", "field=value"],
    "=3": ["command line='=3'", "field=value"],
    "~": ["command line='~'", "field=value"],
    "~training.steps": ["command line='~training.steps'", "training.steps=<value>"],
    "~nccl.max_ctas": ["Write nccl.max_ctas=null"],
    "~nccl.extra": ["~nccl.extra.NAME"],
    "~nccl.extra.NCCL_ALGO": ["command line='~nccl.extra.NCCL_ALGO'", "nothing of that name", "Leave it out"],
    "~trainig": ["no such field or group", "training"],
    "training={stepz:3}": ["training.stepz=3", "training.steps"],
    "training={steps:x}": ["training.steps='x'", "whole number"],
    "tra\u0456ning.steps=3": ["is no name", "training.steps was meant"],
    "training..steps=3": ["is no name", "training.steps was meant"],
    "comm@elsewhere=fp8": ["comm@elsewhere"],
    "rerun=nothing": ["rerun='nothing'", "run folder", "hash", "W&B"],
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_one_clear_message(argument, submitted):
    result = call(argument)
    assert result.code == 2
    assert result.out == ""
    assert "Traceback" not in result.err
    assert "Error executing job" not in result.err
    for part in BAD[argument]:
        assert part in result.err
    assert submitted == []


def test_hydras_own_words_come_with_the_override_that_they_are_about():
    from hydra.errors import HydraException

    from europa_exp.launch.compose import explained

    typed = ["cluster=slurm", "+cluster.sbatch_args.qos=x", "nccl=jupiter"]
    with pytest.raises(ConfigError) as e, explained(typed, lambda group: []):
        raise HydraException("Could not override 'cluster.sbatch_args.qos'.")
    assert "cluster.sbatch_args.qos='+cluster.sbatch_args.qos=x': Could not" in str(e.value)


def test_a_plus_too_many_or_too_few_is_put_right(submitted):
    assert call("+training.steps=3", "++comm=fp8", "+experiment=ladder/08_fp8_gather").code == 7
    assert call("-m", "sweeps=comm_nccl").code == 7
    (((single,), _), (points, _)) = submitted
    assert single.overrides == ["training.steps=3", "comm=fp8", "experiment=ladder/08_fp8_gather"]
    assert len(points) > 1


def test_a_mapping_of_free_names_is_taken_whole():
    slurm = ["cluster=slurm", "cluster.partition=p", "cluster.time_limit=01:00:00"]
    (point,) = plan(*slurm, "cluster.sbatch_args={qos:x, hold: true}", "cluster.env={A: 1e3}").points
    assert point.cfg.cluster.sbatch_args == {"qos": "x", "hold": "true"}
    assert point.cfg.cluster.env == {"A": "1e3"}
    (point,) = plan("nccl=jupiter", "nccl.extra={NCCL_ALGO:Ring}").points
    assert point.cfg.nccl.extra["NCCL_ALGO"] == "Ring"
    assert len(point.cfg.nccl.extra) > 1 or plan("nccl=jupiter").points[0].cfg.nccl.extra == {}


def test_all_problems_of_all_points_come_at_once(submitted):
    result = call("-m", "comm=fp8,fp9", "nccl.max_ctas=8,0", "training.steps=1,1e3")
    assert result.code == 2
    for part in ("comm='fp9'", "training.steps", "nccl.max_ctas=0", "point 3 ("):
        assert part in result.err
    assert submitted == []


def test_a_bad_value_beside_a_sweep(submitted):
    result = call("-m", "comm=fp8,bf16", "nccl.max_cta=1", "training.steps=1e3")
    assert result.code == 2
    assert "nccl.max_ctas" in result.err
    assert "training.steps=1000" in result.err
    assert submitted == []


def test_a_single_run_and_a_sweep_of_one_submit_the_same(submitted):
    assert call("comm=fp8", "nccl.max_ctas=16").code == 7
    assert call("-m", "comm=fp8", "nccl.max_ctas=16").code == 7
    (single, no_sweep), (of_sweep, _) = submitted
    assert len(single) == len(of_sweep) == 1
    assert single[0] == of_sweep[0]
    assert no_sweep is None
    assert single[0].delta == {"comm.expert_all_gather": "fp8", "nccl.max_ctas": 16}
    assert single[0].overrides == ["comm=fp8", "nccl.max_ctas=16"]
    assert single[0].identity == identity(single[0].cfg)
    assert single[0].identity in single[0].name


def test_the_six_points_and_their_names(submitted):
    assert call("comm=fp8,bf16", "-m", "nccl.max_ctas=8,16,32").code == 7
    ((points, sweep),) = submitted
    assert [p.overrides for p in points] == [
        [f"comm={c}", f"nccl.max_ctas={n}"] for c in ("fp8", "bf16") for n in (8, 16, 32)
    ]
    assert len({p.name for p in points}) == len({p.identity for p in points}) == 6
    assert sweep.startswith("comm_max_ctas-")


def test_a_name_begins_with_what_tells_a_point_from_the_others():
    layout = ["parallelism.data_parallel_shard_degree=2", "parallelism.data_parallel_replicate_degree=2"]
    same = [
        "training.steps=6",
        "model.n_layers=2",
        "parallelism.expert_parallel_degree=1",
        "nccl.max_ctas=8",
        *layout,
    ]
    names = [p.name for p in plan("training.seed=0,1,2", *same, multirun=True).points]
    assert "seed=" not in names[0]
    assert [name.partition("-")[0] for name in names[1:]] == ["seed=1", "seed=2"]
    assert all("-plus" in name for name in names)
    (single,) = plan("training.seed=1", *same).points
    assert single.name.startswith("n_layers=2-")
    experiments = plan("experiment=ladder/08_fp8_gather", "training.seed=1,2", *same, multirun=True)
    assert experiments.points[0].name.startswith("08_fp8_gather-seed=1-")


def test_two_calls_in_the_same_second_are_two_sweeps(submitted):
    for _ in range(2):
        call("-m", "nccl.max_ctas=8,16")
    call("-m", "nccl.max_ctas=8,16", "launch.sweep_name=mine")
    names = [sweep for _, sweep in submitted]
    assert len(set(names)) == 3
    assert names[2] == "mine"


def test_repeats_share_an_identity():
    points = plan("comm=fp8", "launch.repeat=3").points
    assert [p.repeat for p in points] == [0, 1, 2]
    assert len({p.identity for p in points}) == 1


def test_equal_points_are_a_problem():
    with pytest.raises(ConfigError) as e:
        plan("nccl.max_ctas=8,16,8", multirun=True)
    assert "point 1 (nccl.max_ctas=8)" in str(e.value)
    assert "point 3 (nccl.max_ctas=8)" in str(e.value)
    assert "launch.repeat" in str(e.value)


def test_launch_settings_cannot_be_swept():
    with pytest.raises(ConfigError, match="launch settings belong to the whole call"):
        plan("launch.force=true,false", "nccl.max_ctas=8", multirun=True)


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("nccl.max_ctas=range(8,11)", ["8", "9", "10"]),
        ("nccl.max_ctas=choice(8,16)", ["8", "16"]),
        ("nccl.max_ctas=sort(16,8)", ["8", "16"]),
        ("comm=glob(*)", ["bf16", "bf16_a2a", "fp8", "fp8_a2a"]),
        ("comm=glob([f*])", ["fp8", "fp8_a2a"]),
    ],
)
def test_sweep_functions(sweep, values):
    key = sweep.split("=")[0]
    assert overrides(plan(sweep, multirun=True)) == [[f"{key}={v}"] for v in values]


def test_shuffle_keeps_all_values():
    found = overrides(plan("nccl.max_ctas=shuffle(range(8,12))", multirun=True))
    assert sorted(found) == sorted([f"nccl.max_ctas={v}"] for v in range(8, 12))


@pytest.mark.parametrize(
    ("sweep", "part"),
    [
        ("nccl.max_ctas=interval(1,2)", "range(start,stop,step)"),
        ("nccl.max_ctas=range(3,3)", "empty"),
        ("training.seed=range(0,20000)", "20000 points"),
    ],
)
def test_sweeps_that_are_no_list_of_points(sweep, part):
    with pytest.raises(ConfigError) as e:
        plan(sweep, multirun=True)
    assert part in str(e.value)


def test_a_swept_text_with_a_comma_stays_one_text():
    found = plan("tracking.notes='a,b'", "nccl.max_ctas=8,16", multirun=True)
    assert [p.cfg.tracking.notes for p in found.points] == ["a,b"] * 2


def test_many_points_compose_as_hydra_composes_each():
    """The shared composition of points is a short cut; it must not be seen."""
    from hydra.types import RunMode
    from omegaconf import flag_override

    from europa_exp.launch.compose import resolve
    from europa_exp.launch.plugins import composer

    points = [
        "comm=fp8",
        "nccl=jupiter",
        "nccl.max_ctas=8",
        "+nccl.extra.NCCL_ALGO=Ring",
        "training.steps=${training.seed}",
    ]
    with composer(ROOT / "conf") as made:
        for n in range(len(points) + 1):
            ours = resolve(made.compose(points[:n]).cfg)
            theirs = made.loader.load_configuration("config", points[:n], RunMode.RUN)
            with flag_override(theirs, ["struct", "readonly"], [False, False]):
                del theirs["hydra"]
            assert ours == resolve(theirs)


def test_points_do_not_share_state():
    points = plan("comm=fp8", "training.steps=3,4", "cluster.env.OMP_PROC_BIND=true", multirun=True).points
    points[0].cfg.cluster.env["X"] = "1"
    assert points[1].cfg.cluster.env == {"OMP_PROC_BIND": "true"}
    assert [p.cfg.training.steps for p in points] == [3, 4]


def test_preview_prints_the_points_and_submits_nothing(submitted):
    result = call("-m", "comm=fp8,bf16", "nccl.max_ctas=8,16,32", "launch.preview=true", "launch.repeat=2")
    assert result.code == 0
    assert submitted == []
    lines = result.out.splitlines()
    assert lines[0].split() == ["name", "hash", "what", "differs", "ranks", "runs"]
    assert len(lines) == 1 + 6 + 1
    assert lines[1].endswith("comm.expert_all_gather=fp8 nccl.max_ctas=8    4      2")
    assert "12 runs" in lines[-1]


def test_preview_of_one_run_and_of_what_points_share():
    assert "nothing (the default composition)" in call("launch.preview=true").out
    out = call("-m", "comm=fp8", "nccl.max_ctas=8,16", "launch.preview=true").out
    assert "all: comm.expert_all_gather=fp8" in out


def test_preview_in_a_terminal_is_a_table():
    import io

    from europa_exp.launch.preview import show

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    show(plan("comm=fp8"), stream)
    assert "expert_all_gather" in stream.getvalue()
    assert "│" in stream.getvalue()


def test_cfg_job_prints_the_composition_and_refuses_bad_input():
    result = call("--cfg", "job", "comm=fp8")
    assert result.code == 0
    assert "expert_all_gather: fp8" in result.out
    assert call("--cfg", "job", "comm=fp9").code == 2


def test_help_lists_groups_and_sweeps_and_no_folder_of_the_repository():
    out = call("--help").out.split("== Config ==")[0]
    for part in ("comm: bf16, bf16_a2a, fp8, fp8_a2a", "experiment/ladder: 00_baseline", "sweeps: comm_nccl"):
        assert part in out
    assert "europa_exp" not in out
    assert "tests" not in out


def spoiled(tmp_path: Path, file: str, old: str, new: str) -> Path:
    root = copied_root(tmp_path)
    path = root / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return root


@pytest.mark.parametrize(
    ("file", "old", "new", "parts"),
    [
        (
            "conf/training/default.yaml",
            "steps: 16",
            "steps: 16\nsteps: 30",
            ["default.yaml", "duplicate", "steps"],
        ),
        ("conf/training/default.yaml", "steps: 16", "steps: ???", ["training.steps", "needs a value"]),
        ("conf/training/default.yaml", "steps: 16", "steps: ${training.stepz}", ["training.steps", "stepz"]),
        ("conf/training/default.yaml", "steps: 16", "steps: ${training.steps}", ["training.steps"]),
        ("conf/training/default.yaml", "steps: 16", "stepz: 16", ["stepz", "training/default"]),
        ("conf/training/default.yaml", "steps: 16", "steps: many", ["training/default", "many"]),
        ("conf/training/default.yaml", "steps: 16", "steps: [16", ["default.yaml"]),
    ],
)
def test_broken_files_in_conf(tmp_path, submitted, file, old, new, parts):
    root = spoiled(tmp_path, file, old, new)
    for arguments in (["comm=fp8"], ["-m", "comm=fp8,bf16"]):
        result = call(*arguments, root=root)
        assert result.code == 2, result.err
        assert "Traceback" not in result.err
        for part in parts:
            assert part in result.err
    assert submitted == []


@pytest.mark.parametrize("switch", ["launch.preview=true", "nccl.socket_ifname=1e3"])
def test_a_broken_file_is_not_blamed_on_a_right_value_beside_it(tmp_path, submitted, switch):
    root = spoiled(tmp_path, "conf/training/default.yaml", "steps: 16", "stepz: 16")
    (root / "sweeps" / "wrong.yaml").write_text("param: {comm: fp8}\n")
    for arguments, part in (([], "stepz"), (["-m", "+sweeps=wrong"], "param")):
        result = call(*arguments, switch, root=root)
        assert result.code == 2
        assert part in result.err
        assert "must be" not in result.err
    assert submitted == []


def test_errors_while_submitting_are_not_taken_for_bad_input(monkeypatch):
    import europa_exp.launch.submit as module

    def broken(*args, **kwargs):
        raise ValueError("a mistake in the code")

    monkeypatch.setattr(module, "submit", broken)
    for arguments in (["comm=fp8"], ["-m", "comm=fp8"]):
        with pytest.raises(ValueError, match="a mistake in the code"):
            call(*arguments)


def test_a_runs_folder_that_cannot_be_made_is_one_message(monkeypatch):
    import europa_exp.launch.submit as module
    from europa_exp.runs.folder import RunFolderError

    def broken(*args, **kwargs):
        raise RunFolderError("runs/ can't be written: disk full")

    monkeypatch.setattr(module, "submit", broken)
    result = call("comm=fp8")
    assert result.code == 1
    assert result.err == "runs/ can't be written: disk full\n"


def test_flags_may_stand_anywhere():
    flags, rest = split_flags(["a=1", "-m", "b=2", "--cfg", "job", "c=-3"])
    assert flags == ["-m", "--cfg", "job"]
    assert rest == ["a=1", "b=2", "c=-3"]


def test_the_launcher_serves_other_sweepers(submitted):
    from hydra.core.global_hydra import GlobalHydra

    from europa_exp.launch.plugins import composer

    with composer(ROOT / "conf") as made:
        config = made.load([], multirun=True)
        launcher = plugins.EuropaLauncher()
        context = type("Context", (), {"config_loader": GlobalHydra.instance().config_loader()})()
        plugins.hand_over = lambda found: hand_over(found, ["x"])
        launcher.setup(hydra_context=context, task_function=None, config=config)
        returned = launcher.launch([["comm=fp8"], ["comm=bf16"]], initial_job_idx=0)
    assert [r.return_value for r in returned] == [7, 7]
    assert len(submitted) == 1
    assert len(submitted[0][0]) == 2


FORBIDDEN = """
import sys
sys.argv = ["launch.py", *sys.argv[2:]]
from pathlib import Path
from europa_exp.launch.main import main
code = main(Path({root!r}))
heavy = sorted(m for m in ("torch", "torchtitan", "wandb", "numpy", "submitit") if m in sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cfg", "job"],
        ["-m", "comm=fp8,bf16", "nccl.max_ctas=range(1,25)", "launch.preview=true"],
        ["rerun=nothing"],
    ],
)
def test_the_login_node_imports_nothing_heavy(arguments):
    script = FORBIDDEN.format(root=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", script, "-", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "AssertionError" not in done.stderr
    assert done.returncode == (2 if arguments == ["rerun=nothing"] else 0), done.stderr
    if "-m" in arguments:
        assert "48 runs" in done.stdout


def test_launch_py_works_from_any_folder_and_quotes_as_it_says():
    def run(argument: str) -> subprocess.CompletedProcess[str]:
        line = f"{sys.executable} {ROOT / 'launch.py'} launch.preview=true {argument}"
        return subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120, check=False)

    refused = run("tracking.notes=a=b#c")
    assert refused.returncode == 2
    advice = refused.stderr[refused.stderr.index("'tracking") :].strip().rstrip(".")
    accepted = run(advice)
    assert accepted.returncode == 0, accepted.stderr


def test_ctrl_c_while_composing(monkeypatch, submitted):
    from europa_exp.launch import expand

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(expand, "make_points", interrupted)
    for arguments in (["comm=fp8"], ["-m", "comm=fp8"]):
        assert call(*arguments).code == 130
    assert submitted == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["comm.node_local_reshard=2"],
        ["-m", "profiling.collectives=2,true"],
        ["+offload={fsdp_cpu:7}"],
        ["training.deterministic=-3"],
    ],
)
def test_a_number_is_no_boolean(arguments, submitted):
    result = call(*arguments)
    assert result.code == 2
    assert result.err.count("must be true or false") == 1
    assert submitted == []


def test_an_experiment_leads_names_and_what_differs():
    rungs = ["ladder/10_node_local_reshard", "ladder/12_stream_pools"]
    out = call("-m", f"experiment={','.join(rungs)}", "training.steps=3,4", "launch.preview=true").out
    rows = out.splitlines()[1:5]
    for i, row in enumerate(rows):
        name, digest, first = row.split()[:3]
        assert name == f"{rungs[i // 2].split('/')[1]}-steps={3 + i % 2}-{digest}"
        assert first == f"experiment={rungs[i // 2]}"
        assert len(row) < 60 + 22 + 120
    (common,) = [line for line in out.splitlines() if line.startswith("all: ")]
    assert len(common) <= len("all: ") + 120
    one = call("experiment=ladder/13_nccl_ctas", "launch.preview=true").out.splitlines()[1]
    assert one.split()[0] == f"13_nccl_ctas-{one.split()[1]}"
    assert " experiment=ladder/13_nccl_ctas " in one
    assert re.search(r" and \d+ more ", one)
