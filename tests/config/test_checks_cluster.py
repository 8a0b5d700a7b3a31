"""Rules of clusters and of the call: each refuses what it should in words that help, and nothing else."""

from __future__ import annotations

import pytest

from europa_exp.config import walltime
from europa_exp.config.checks import check
from europa_exp.config.identity import identity
from europa_exp.config.io import from_yaml, hints, to_yaml
from europa_exp.config.rules.cluster import SLURM_FIELDS, SLURM_LAUNCH
from europa_exp.config.schema import MasterAddr, MemoryScope, Preview


@pytest.fixture
def found(make):
    def run(*overrides):
        problems = check(make(*overrides))
        assert all(len(str(p).splitlines()) == 1 and p.way_out for p in problems)
        return {p.field: p for p in problems}

    return run


GOOD = [
    ("cluster=slurm",),
    ("cluster=jupiter", "cluster.account=me"),
    ("cluster=jupiter", "launch.preview='script'"),
    ("experiment=europa_1t", "cluster=jupiter", "cluster.account=me", "cluster.time_limit=12:00:00"),
    ("cluster=slurm", "cluster.time_limit=1-12:00:00", "cluster.comment='a b;c'", "cluster.gres='gpu:a100:4(S:0-1)'"),
    ("cluster=slurm", "cluster.gres='gpu:2,lustre:1'", "cluster.cpus_per_task=4", "cluster.threads_per_rank=4"),
    ("cluster=slurm", "cluster.inside_allocation=true", "cluster.time_limit=null"),
    ("cluster=jupiter", "cluster.inside_allocation=true"),
    ("cluster=slurm", "cluster.unpack=/p/env.tar.zst", "cluster.unpack_to=/dev/shm/env"),
    ("cluster=slurm", "+cluster.sbatch_args.qos=debug", "cluster.srun_args=['--cpu-bind=verbose','--label']"),
    ("cluster=slurm", "launch.dependency='afterok:1:2,afterany:3_1'", "launch.detach=true", "launch.throttle=1"),
    ("cluster=slurm", "launch.dependency=singleton", "launch.points_per_job=3", "launch.max_array_size=11"),
    # what a record from a cluster brings along may be run on one machine
    ("cluster=local", "cluster.numa_binding=cpu", "cluster.comment=x"),
]  # fmt: skip


@pytest.mark.parametrize("overrides", GOOD, ids=" ".join)
def test_good_settings(found, overrides):
    assert found(*overrides) == {}


BAD = [
    (["cluster=slurm", "cluster.time_limit=null"], "cluster.time_limit", ["needs a time limit", "01:00:00"]),
    (["cluster=slurm", "cluster.time_limit='90'"], "cluster.time_limit", ["HH:MM:SS", "00:30:00"]),
    (["cluster=slurm", "cluster.time_limit='1:99:00'"], "cluster.time_limit", ["HH:MM:SS"]),
    (["cluster=slurm", "cluster.time_limit=00:00:00"], "cluster.time_limit", ["no time at all"]),
    (["cluster=slurm", "cluster.max_time_limit=long"], "cluster.max_time_limit", ["HH:MM:SS"]),
    (["cluster=jupiter", "cluster.account=a", "cluster.time_limit=12:00:01"], "cluster.time_limit", ["max_time_limit=12:00:00"]),
    (["cluster=slurm", "cluster.time_limit=00:01:00"], "cluster.signal_margin_s", ["60 s", "cluster.signal_margin_s=20"]),
    (["cluster=slurm", "cluster.preload=true"], "cluster.preload", ["executor=local"]),
    (["cluster=jupiter"], "cluster.account", ["cluster.account=<budget>", "jupiter:"]),
    (["cluster=slurm", "cluster.account=''"], "cluster.account", ["empty", "null"]),
    (["cluster=slurm", "cluster.partition='a b'"], "cluster.partition", ["spaces"]),
    (["cluster=slurm", "cluster.modules=['GCC; touch x']"], "cluster.modules[0]", ["one module"]),
    (["cluster=slurm", "cluster.modules=['GCC Python']"], "cluster.modules[0]", ["one list entry"]),
    (["cluster=slurm", "cluster.modules=['--force']"], "cluster.modules[0]", ["one module"]),
    (["cluster=slurm", "cluster.unpack=/a.tar"], "cluster.unpack", ["cluster.unpack_to"]),
    (["cluster=slurm", "cluster.unpack=/a.tar", "cluster.unpack_to=env"], "cluster.unpack_to", ["absolute"]),
    (["cluster=here", "launch.detach=true"], "launch.detach", ["inside an allocation", "sbatch"]),
    (["cluster=here", "launch.points_per_job=2"], "launch.points_per_job", ["take turns"]),
    (["cluster=slurm", "launch.dependency=after5"], "launch.dependency", ["afterok:123456"]),
    (["cluster=slurm", "+cluster.sbatch_args.time=5"], "cluster.sbatch_args.time", ["cluster.time_limit"]),
    (["cluster=slurm", "+cluster.sbatch_args.mail_user=a"], "cluster.sbatch_args.mail_user", ["cluster.mail_user"]),
    (["cluster=slurm", "+cluster.sbatch_args.output=x"], "cluster.sbatch_args.output", ["launcher"]),
    (["cluster=slurm", "+cluster.sbatch_args.p=x"], "cluster.sbatch_args.p", ["long option"]),
    (["cluster=slurm", "cluster.srun_args=['-l']"], "cluster.srun_args[0]", ["long option"]),
    (["cluster=slurm", "cluster.srun_args=['--label','--cpu-bind cores']"], "cluster.srun_args[1]", ["after ="]),
    (["cluster=slurm", "cluster.srun_args=['--nodes=3']"], "cluster.srun_args[0]", ["parallelism.nodes"]),
    (["cluster=slurm", "cluster.srun_args=['--kill-on-bad-exit=0']"], "cluster.srun_args[0]", ["launcher"]),
    (["cluster=slurm", "cluster.gres='gpu:1'"], "cluster.gres", ["1 GPU a node", "gpu:2"]),
    (["cluster=slurm", "cluster.gres='gpu'"], "cluster.gres", ["1 GPU a node"]),
    (["cluster=slurm", "cluster.cpus_per_task=1", "cluster.threads_per_rank=2"], "cluster.threads_per_rank", ["cpus_per_task=1"]),
    (["cluster=jupiter", "cluster.account=a", "tracking=online"], "tracking.mode", ["no internet", "offline"]),
    (["cluster=slurm", "cluster.numa_required=true"], "cluster.numa_required", ["numa_binding"]),
    (["cluster=slurm", "cluster.comment=None"], "cluster.comment", ["the word"]),
    (["cluster=slurm", "cluster.setup=[\"a\nb\"]"], "cluster.setup", ["U+000A"]),
    (["launch.preview='script'"], "launch.preview", ["no job script"]),
    (["launch.throttle=0"], "launch.throttle", ["at least 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "field", "words"), BAD, ids=[" ".join(b[0]) for b in BAD])
def test_one_mistake_is_one_problem(found, overrides, field, words):
    problems = found(*overrides)
    assert set(problems) == {field}
    for word in words:
        assert word in str(problems[field])


@pytest.mark.parametrize(
    "dotted", [*(f"cluster.{n}" for n in SLURM_FIELDS), *(f"launch.{n}" for n in SLURM_LAUNCH)]
)
def test_what_belongs_to_slurm_is_refused_on_one_machine(make, dotted):
    group, name = dotted.split(".")
    cfg = make()
    settings = getattr(cfg, group)
    hint = hints(type(settings))[name]
    samples = {bool: True, int: 7, int | None: 7, float | None: 7.0, str | None: "x"}
    samples |= {list[str]: ["--a"], dict[str, str]: {"qos": "a"}}
    samples |= {MasterAddr: MasterAddr.node_addr, MemoryScope: MemoryScope.host}
    value = next(v for key, v in samples.items() if key == hint)
    setattr(settings, name, value)
    (problem,) = check(cfg)
    assert problem.field == dotted
    assert "executor=slurm, and cluster=local runs on this machine" in problem.rule


def test_time_limits():
    assert walltime.seconds("00:00:01") == 1
    assert walltime.seconds("1-00:00:00") == 86400
    assert walltime.seconds("100:00:00") == 360000
    assert [walltime.minutes(t) for t in ("00:00:01", "00:01:00", "00:01:01")] == [1, 1, 2]
    for text in ("", "60", "1:00", "-1:00:00", "00:60:00", "1-", "x", "1-00:00:00:00"):
        with pytest.raises(ValueError, match="HH:MM:SS"):
            walltime.seconds(text)


# ---------------------------------------------------------------------------------------------------- records, identity


def test_where_and_how_a_job_runs_is_no_part_of_the_identity(make):
    on_slurm = make(
        "cluster=slurm", "cluster.time_limit=02:00:00", "cluster.modules=[A]", "launch.points_per_job=2"
    )
    assert identity(on_slurm) == identity(make())


@pytest.mark.parametrize(
    "override", ["cluster.numa_binding=cpu", "cluster.comment='CPU_POWER_CAP=1'", "++cluster.env.A='1'"]
)
def test_what_changes_speed_is_part_of_it(make, override):
    assert identity(make("cluster=slurm", override)) != identity(make())


@pytest.mark.parametrize(("written", "read"), [("false", Preview.false), ("true", Preview.true)])
def test_records_from_before_scripts_could_be_previewed_are_read(make, written, read):
    text = to_yaml(make()).replace("preview: 'false'", f"preview: {written}")
    assert f"preview: {written}\n" in text
    cfg = from_yaml(text)
    assert cfg.launch.preview is read
    assert bool(cfg.launch.preview) is (written == "true")


def test_a_record_with_every_setting_survives_writing_and_reading(make):
    cfg = make(
        "cluster=jupiter", "launch.preview='script'", "++cluster.sbatch_args.qos=a", "cluster.setup=['x: y']"
    )
    assert from_yaml(to_yaml(cfg)) == cfg
