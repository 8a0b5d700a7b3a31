"""The job script: what is printed is what sbatch gets, byte for byte, and the shell does with it what it says."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compose import composed
from composing import ROOT, call

from europa_exp.launch import arrays, preview, slurm
from europa_exp.launch.points import Point
from europa_exp.runs.folder import RunFolder

GOLDEN = Path(__file__).parent / "golden"
UPDATE = "EUROPA_UPDATE_GOLDEN"
"""Set it to write the golden files anew; then read what git says has changed."""


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    """An empty folder, and a user with an account."""
    mine = tmp_path / "cluster.yaml"
    mine.write_text(
        "jupiter: {account: mybudget, mail_user: me@example.org, mail_type: 'END,FAIL'}\n"
        "juwels_booster: {account: mybudget}\n"
    )
    monkeypatch.setenv("EUROPA_USER_CONFIG", str(mine))
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def printed(*arguments):
    """The script that a call prints."""
    result = call(*arguments, "launch.preview=script")
    assert (result.code, result.err) == (0, "")
    return result.out


# ----------------------------------------------------------------------------------------------------------- golden files

CALLS = {
    "jupiter_96_nodes": ["experiment=europa_1t", "cluster=jupiter", "cluster.time_limit=12:00:00"],
    "juwels_booster": ["cluster=juwels_booster", "parallelism.gpus_per_node=4", "parallelism.nodes=1"],
    "slurm": [
        "-m",
        "cluster=slurm",
        "comm=fp8,bf16",
        "nccl.max_ctas=8,16",
        "launch.throttle=2",
        "launch.max_array_size=1001",
        "+cluster.sbatch_args.hold=true",
    ],
}


def normalised(text, folder):
    for path, name in (
        (f"{folder / 'runs'}", "<runs>"),
        (sys.executable, "<python>"),
        (f"{ROOT}", "<code>"),
    ):
        text = text.replace(path, name)
    return text


@pytest.mark.parametrize("name", list(CALLS))
def test_script_is_the_golden_one(name, at_home):
    text = normalised(printed(*CALLS[name]), at_home)
    file = GOLDEN / f"{name}.sh"
    if os.environ.get(UPDATE):
        file.write_text(text)
    assert text == file.read_text(), f"if that is meant, run this test once with {UPDATE}=1"


@pytest.mark.parametrize("name", list(CALLS))
def test_script_is_valid_shell(name):
    subprocess.run(["bash", "-n"], input=printed(*CALLS[name]), text=True, check=True)


def test_nothing_is_left_behind(at_home):
    printed(*CALLS["slurm"])
    assert list(at_home.iterdir()) == []


def test_one_script_for_each_shape():
    out = printed("-m", "cluster=slurm", "comm=fp8,bf16", "cluster.numa_binding=none,cpu")
    assert out.count("#!/bin/bash") == 2
    assert [line[:24] for line in out.splitlines() if line.startswith("# ====")] == [
        "# ======== script 1 of 2",
        "# ======== script 2 of 2",
    ]
    first, second = out.split("# ======== script 2 of 2")
    assert "numa_bind.sh" not in first
    assert "numa_bind.sh" in second
    assert out.count("--array=0-1%2\n") == 2


def test_more_jobs_than_an_array_may_have():
    out = printed("-m", "cluster=slurm", "training.seed=range(1,26)", "launch.max_array_size=11")
    assert [line for line in out.splitlines() if "--array" in line] == [
        "#SBATCH --array=0-10%11",
        "#SBATCH --array=0-2%3",
    ]


# -------------------------------------------------------------------------------- what is printed is what Slurm is given


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder on PATH for commands that tests write, with an sbatch that keeps what it was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(name, *lines):
        (folder / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
        (folder / name).chmod(0o755)

    write(
        "sbatch",
        f'cp "$1" {tmp_path}/given.sh',
        f"env -0 >{tmp_path}/environment",
        "echo Submitted batch job 77",
    )
    write(
        "srun",
        f'printf "%s\\0" "$@" >{tmp_path}/srun_args',
        f"env -0 >{tmp_path}/srun_env",
        'exit "${SRUN_CODE:-0}"',
    )
    return write


@pytest.mark.parametrize("n", [1, 3])
def test_submitit_hands_over_the_text_that_is_printed(n, commands, tmp_path):
    cfg = composed("cluster=jupiter", "launch.throttle=2")
    executor = slurm.make_executor(cfg, cfg.launch, folder=tmp_path / "job", name="a sweep")
    text = executor.text(n)
    assert text == executor.text(n)
    with executor.batch():
        for _ in range(n):
            executor.submit(os.getpid)
    assert (tmp_path / "given.sh").read_text() == text
    assert text == slurm.script_text(cfg, cfg.launch, folder=tmp_path / "job", name="a sweep", n_jobs=n)


@pytest.mark.parametrize(
    ("given", "how", "expected"),
    [
        (None, {}, None),
        ("afterok:5", {}, "afterok:5"),
        (None, {"behind": ["70_0", "70_1", "71"]}, "afterany:70:71"),
        ("afterok:5", {"behind": ["70"]}, "afterok:5,afterany:70"),
        ("afterok:5", {"after": "70"}, "afternotok:70"),
    ],
)
def test_what_a_job_waits_for(given, how, expected, commands, tmp_path):
    cfg = composed("cluster=slurm")
    cfg.launch.dependency = given
    run = RunFolder(tmp_path / "run")
    (tmp_path / "job").mkdir()
    array = arrays.Array(((run,),), cfg, tmp_path / "job")
    assert arrays.submit(array, cfg.launch, name="n", entry="a:b", code=None, **how) == ["77"]
    found = re.findall(r"^#SBATCH --dependency=(.*)$", (tmp_path / "given.sh").read_text(), re.MULTILINE)
    assert found == ([expected] if expected else [])
    assert json.loads((tmp_path / "job" / "jobs.json").read_text()) == [
        {"runs": [str(run.path)], "entry": "a:b"}
    ]


def test_script_can_be_written_where_there_is_no_slurm(monkeypatch, tmp_path):
    cfg = composed("cluster=jupiter")
    here = slurm.script_text(cfg, cfg.launch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("srun") is None
    assert slurm.script_text(cfg, cfg.launch) == here


def test_no_secret_of_the_shell_gets_into_it(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "verysecret")
    assert "verysecret" not in printed(*CALLS["jupiter_96_nodes"])


# ----------------------------------------------------------------------------------------- what the shell does with it


def run_script(text, tmp_path, **environ):
    file = tmp_path / "job.sh"
    file.write_text(text)
    done = subprocess.run(
        ["bash", str(file)], capture_output=True, text=True, timeout=60, env={**os.environ, **environ}
    )
    args = (
        (tmp_path / "srun_args").read_text().split("\0")[:-1] if (tmp_path / "srun_args").exists() else None
    )
    seen = (tmp_path / "srun_env").read_text().split("\0") if args is not None else []
    return done, args, dict(line.split("=", 1) for line in seen if "=" in line)


def text_of(*overrides, **more):
    cfg = composed(*overrides)
    return slurm.script_text(cfg, cfg.launch, **more)


@pytest.mark.parametrize("code", [0, 1, 37, 137])
def test_exit_code_is_that_of_the_ranks(code, commands, tmp_path):
    done, args, _ = run_script(text_of("cluster=slurm"), tmp_path, SRUN_CODE=str(code))
    assert done.returncode == code
    assert "--kill-on-bad-exit=1" in args


def test_ranks_get_cores_and_code(commands, tmp_path):
    _, _, seen = run_script(text_of("cluster=slurm", "cluster.cpus_per_task=9"), tmp_path, PYTHONPATH="/mine")
    assert seen["SRUN_CPUS_PER_TASK"] == "9"
    assert seen["PYTHONPATH"] == f"{ROOT}:/mine"
    frozen = tmp_path / "my code"
    _, args, seen = run_script(
        text_of("cluster=slurm", "cluster.numa_binding=cpu", code=frozen), tmp_path, PYTHONPATH=""
    )
    assert seen["PYTHONPATH"] == str(frozen)
    assert args[-6:-4] == ["go_on", sys.executable]
    assert str(frozen / "europa_exp/launch/numa_bind.sh") in args


OLD_ENV = 'case "$1" in --block-signal*) echo "env: unrecognized option" >&2; exit 125 ;; esac; exec /usr/bin/env "$@"'


@pytest.mark.parametrize("env", ["new", "old"])
def test_a_signal_does_not_end_what_comes_before_the_ranks(env, commands, tmp_path):
    """It waits for them; with an old env it is not heeded."""
    if env == "old":
        commands("env", OLD_ENV)
    alive = 'kill -USR2 $$; trap "echo it waited" USR2; /bin/true; echo alive'
    _, args, _ = run_script(text_of("cluster=slurm", f"cluster.python='bash -c \\'{alive}\\''"), tmp_path)
    command = args[args.index("--kill-on-bad-exit=1") + 1 :]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_a_signal_does_not_end_the_unpacking(commands, tmp_path):
    commands("srun", 'while [ "$1" != bash ]; do shift; done', 'exec "$@"')
    commands("tar", "kill -USR2 $PPID $$", f'echo "$@" >{tmp_path}/unpacked')
    cfg = composed("cluster=slurm")
    cfg.cluster.unpack, cfg.cluster.unpack_to, cfg.cluster.python = (
        "/a.tar",
        str(tmp_path / "place"),
        "bash -c true",
    )
    done, _, _ = run_script(slurm.script_text(cfg, cfg.launch), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "unpacked").read_text() == f"-xf /a.tar -C {tmp_path / 'place'}\n"


def test_odd_texts_reach_srun_unchanged(commands, tmp_path, at_home):
    odd = at_home / 'it\'s $(touch hit) `touch hit` "my" runs'
    cfg = composed(
        "cluster=slurm", "cluster.srun_args=['--label=$(touch hit)']", "cluster.python='a b \"c d\"'"
    )
    text = slurm.script_text(cfg, cfg.launch, folder=odd, name="$(touch hit)")
    done, args, _ = run_script(text, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert args[-1] == str(odd)
    assert "--label=$(touch hit)" in args
    begin = ["env", "--block-signal=USR2,TERM"]
    assert args[args.index("--label=$(touch hit)") + 1 :][:5] == [*begin, "a", "b", "c d"]
    assert not list(Path.cwd().glob("hit"))


def test_modules_are_loaded_in_order_before_the_setup_lines(commands, tmp_path):
    commands("note", f'echo "$@" >>{tmp_path}/order')
    text = text_of(
        "cluster=slurm",
        "cluster.modules=[Stages/2026,GCC]",
        "cluster.setup=['note setup','export FROM_SETUP=1']",
    )
    module = '() { note "module $*"; }'
    _, _, seen = run_script(text, tmp_path, **{"BASH_FUNC_module%%": module})
    assert (tmp_path / "order").read_text().splitlines() == [
        "module load Stages/2026",
        "module load GCC",
        "setup",
    ]
    assert seen["FROM_SETUP"] == "1"


def test_a_module_that_is_not_there_ends_the_job_by_name(commands, tmp_path):
    text = text_of("cluster=slurm", "cluster.modules=[Stages/2026,GCC]")
    module = '() { [ "$2" != GCC ]; }'
    done, args, _ = run_script(text, tmp_path, **{"BASH_FUNC_module%%": module})
    assert (done.returncode, args) == (1, None)
    assert "failed to load GCC" in done.stderr


SETUP = [
    "export FIRST=1  # a comment",
    "if [ -n '' ]; then",
    "false",
    "fi",
    "# nothing",
    "export SECOND=$FIRST",
]


@pytest.mark.parametrize(
    "failing", [None, "source '/nope/it is/activate'  # of the site", "false", "true && false"]
)
def test_a_setup_line_that_fails_ends_the_job_by_name(failing, commands, tmp_path):
    cfg = composed("cluster=slurm")
    cfg.cluster.setup = [*SETUP, *filter(None, [failing]), "export THIRD=1"]
    done, args, seen = run_script(slurm.script_text(cfg, cfg.launch), tmp_path)
    if failing is None:
        assert (done.returncode, done.stderr) == (0, "")
        assert [seen[name] for name in ("FIRST", "SECOND", "THIRD")] == ["1", "1", "1"]
    else:
        assert (done.returncode, args) == (1, None)
        assert done.stderr.splitlines()[-1] == f"cluster.setup: failed on {os.uname().nodename}: {failing}"


def test_inside_an_allocation_srun_is_told_the_shape(commands, tmp_path):
    text = text_of(
        "cluster=slurm", "cluster.inside_allocation=true", "cluster.gres='gpu:2'", "cluster.time_limit=null"
    )
    _, args, _ = run_script(text, tmp_path)
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--gres=gpu:2"} <= set(args)


def test_outside_an_allocation_it_is_refused(monkeypatch, at_home):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    result = call("cluster=here", "parallelism.nodes=2")
    assert result.code == 2
    assert "this shell holds no allocation" in result.err
    assert "salloc --nodes=2 --ntasks-per-node=2" in result.err
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert "parallelism.nodes=2: job 5, the allocation of this shell, has 1" in call("cluster=here").err
    assert os.listdir(at_home) == []


# ------------------------------------------------------------------------------------------------------------- options


def lines_of(*overrides):
    return {line.removeprefix("#SBATCH --") for line in text_of(*overrides).splitlines() if "#SBATCH" in line}


def test_every_setting_has_its_line():
    found = lines_of(
        "cluster=slurm", "cluster.account=me", "cluster.partition=p", "cluster.time_limit=1-00:00:30",
        "cluster.gres='gpu:a100:2'", "cluster.exclude='n[1-3]'", "cluster.nodelist=n4", "cluster.switches='1@02:00:00'",
        "cluster.mail_user=a@b.c", "cluster.mail_type=ALL", "cluster.comment='CPU_POWER_CAP=1;THP=never'",
        "launch.dependency='afterok:5'", "++cluster.sbatch_args.qos=debug", "++cluster.sbatch_args.exclusive='true'",
        "++cluster.sbatch_args.threads_per_core='1'", "cluster.signal_margin_s=77",
    )  # fmt: skip
    assert found >= {
        "account=me", "partition=p", "time=1441", "gres=gpu:a100:2", "exclude='n[1-3]'", "nodelist=n4", "switches=1@02:00:00",
        "mail-user=a@b.c", "mail-type=ALL", "comment='CPU_POWER_CAP=1;THP=never'", "dependency=afterok:5", "qos=debug",
        "exclusive", "threads-per-core=1", "signal=USR2@77", "nodes=2", "ntasks-per-node=2", "requeue",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("true", "hold"), ("True", "hold"), ("''", "hold"), ("'true'", "hold"), ("false", None), ("'False'", None),
        ("yes", "hold=yes"), ("1", "hold=1"),
    ],
)  # fmt: skip
def test_an_option_without_a_value(value, line):
    found = {
        text for text in lines_of("cluster=slurm", f"+cluster.sbatch_args.hold={value}") if "hold" in text
    }
    assert found == ({line} if line else set())


def test_what_is_not_set_has_no_line():
    names = {line.split("=")[0] for line in lines_of("cluster=slurm", "cluster.requeue=false")}
    assert names == {
        "error", "output", "open-mode", "job-name", "nodes", "ntasks-per-node", "no-requeue", "signal", "time",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ shapes and cost


def points(*overrides, n=1):
    cfg = composed(*overrides)
    return [Point(copy.deepcopy(cfg), [], {}, "h", "p", repeat) for repeat in range(n)]


def test_points_share_a_shape_if_they_share_a_script():
    one = points("cluster=slurm", n=2)
    other = points("cluster=slurm", "comm=fp8", "nccl.max_ctas=8", "training.steps=3")
    longer = points("cluster=slurm", "cluster.time_limit=02:00:00")
    bound = points("cluster=slurm", "cluster.numa_binding=cpu")
    assert slurm.by_shape([one[0], longer[0], *other, one[1], *bound]) == [
        [one[0], *other, one[1]],
        longer,
        bound,
    ]


def test_node_hours():
    assert slurm.node_hours(points("cluster=slurm", "cluster.time_limit=00:30:00", n=3)) == 3 * 2 * 0.5
    in_turn = points("cluster=slurm", "launch.points_per_job=3", n=7)
    assert slurm.node_hours(in_turn) == 3 * 2 * 1.0
    assert slurm.node_hours(in_turn + points("cluster=slurm", "cluster.time_limit=1-00:00:00")) == 6 + 48
    assert slurm.node_hours(points("cluster=local")) == 0
    big = points("experiment=europa_1t", "cluster=jupiter", "cluster.time_limit=12:00:00")
    assert slurm.node_hours(big) == 96 * 12


@pytest.mark.parametrize(
    ("overrides", "hours"),
    [
        (("cluster.max_attempts=1",), 3 * 2),
        (("cluster.max_attempts=4",), 3 * 2 * 4),
        (("cluster.max_attempts=4", "cluster.requeue=false"), 3 * 2 * 4),
        # A job starts once, and three times more for each of its three runs; a chain has four jobs whatever they hold.
        (("cluster.max_attempts=4", "launch.points_per_job=3"), 2 * (1 + 3 * 3)),
        (("cluster.max_attempts=4", "launch.points_per_job=3", "cluster.requeue=false"), 2 * 4),
    ],
)
def test_node_hours_with_all_attempts(overrides, hours):
    assert slurm.most_node_hours(points("cluster=slurm", *overrides, n=3)) == hours


def test_too_many_node_hours_are_refused_and_nothing_is_made(at_home):
    """Whoever sets a budget means all attempts."""
    two = ("-m", "cluster=slurm", "comm=fp8,bf16")
    result = call(*two, "launch.max_node_hours=11.9")
    assert result.code == 2
    assert "launch.max_node_hours=11.9: these 2 runs could use 12 node-hours" in result.err
    assert "(nodes x cluster.time_limit = 4, x cluster.max_attempts)" in result.err
    assert "lower cluster.max_attempts" in result.err
    result = call(*two, "cluster.max_attempts=1", "launch.max_node_hours=3.9")
    assert "these 2 runs could use 4 node-hours (nodes x cluster.time_limit)." in result.err
    assert list(at_home.iterdir()) == []
    assert slurm.too_expensive(points("cluster=slurm", "launch.max_node_hours=12", n=2)) is None


def test_preview_tells_nodes_and_node_hours():
    out = call("-m", "cluster=slurm", "comm=fp8,bf16", "launch.repeat=3", "launch.preview=true").out
    assert out.splitlines()[0].split()[-2:] == ["nodes", "node-hours"]
    assert [line.split()[-4:] for line in out.splitlines()[1:3]] == [["4", "3", "2", "6"]] * 2
    each = "slurm: 6 jobs of 2 nodes for at most 01:00:00, 12 node-hours"
    assert f"{each}; at most 3 attempts a run: 36 node-hours\n" in out
    once = call(
        "-m",
        "cluster=slurm",
        "comm=fp8,bf16",
        "launch.repeat=3",
        "cluster.max_attempts=1",
        "launch.preview=true",
    )
    assert f"{each}\n" in once.out
    shapes = points("cluster=slurm") + points("cluster=slurm", "cluster.time_limit='02:00:00'")
    assert preview.cost(shapes)[-1] == "in all 6 node-hours; with all attempts 18"
    out = call("-m", "cluster=slurm", "comm=fp8,bf16", "launch.max_node_hours=1", "launch.preview=true").out
    assert "would be refused: launch.max_node_hours=1.0" in out
    assert "node-hours" not in call("launch.preview=true").out


def test_preview_needs_no_account_and_says_so(monkeypatch):
    monkeypatch.setenv("EUROPA_USER_CONFIG", "")
    result = call("experiment=europa_1t", "cluster=jupiter", "launch.preview=true")
    assert result.code == 0
    assert "cluster.account is missing, and jupiter takes no job without one" in result.out
    assert "384" in result.out
    script = call("experiment=europa_1t", "cluster=jupiter", "launch.preview=script")
    assert script.code == 0
    assert script.out.startswith("#!")
    assert "cluster.account is missing" not in script.out
    assert script.err == "cluster.account is missing, and jupiter takes no job without one.\n"
    assert call("experiment=europa_1t", "cluster=jupiter").code == 2


# ---------------------------------------------------------------------------------------------------- a clean environment

LEAKS = [
    "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CPU_BIND", "SLURM_TIME_FORMAT", "SBATCH_PARTITION", "SBATCH_ACCOUNT", "SRUN_CPUS_PER_TASK",
    "SALLOC_ACCOUNT", "SQUEUE_FORMAT", "SACCT_FORMAT", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "APPTAINER_NAME", "SINGULARITY_BIND", "RANK",
    "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SUBMITIT_EXECUTOR", "OMP_NUM_THREADS",
]  # fmt: skip
KEPT = ["PATH", "HOME", "WANDB_API_KEY", "SLURM_CONF", "MODULEPATH", "NCCL_DEBUG", "BASH_FUNC_module%%"]


def test_submitting_from_inside_an_allocation_or_a_container_leaks_nothing(commands, tmp_path, monkeypatch):
    for name in LEAKS:
        monkeypatch.setenv(name, "leak")
    for name in KEPT[2:]:
        monkeypatch.setenv(name, "() { :; }")
    before = dict(os.environ)
    cfg = composed("cluster=slurm")
    executor = slurm.make_executor(cfg, cfg.launch, folder=tmp_path / "job", name="n")
    with slurm.clean_environment():
        executor.submit(os.getpid)
    assert dict(os.environ) == before
    seen = {line.split("=", 1)[0] for line in (tmp_path / "environment").read_text().split("\0")}
    assert seen.isdisjoint(LEAKS)
    assert seen >= set(KEPT)
    assert "leak" not in (tmp_path / "given.sh").read_text()


def test_the_environment_comes_back_after_an_error(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    before = dict(os.environ)

    def fail():
        with slurm.clean_environment():
            assert "SLURM_JOB_ID" not in os.environ
            raise OSError

    with pytest.raises(OSError):
        fail()
    assert dict(os.environ) == before
