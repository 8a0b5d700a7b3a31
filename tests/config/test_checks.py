"""Every rule: what it refuses, in which words, and that it leaves good configurations alone."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from europa_exp.config.checks import check
from europa_exp.config.errors import ConfigError
from europa_exp.config.fields import describe
from europa_exp.config.identity import identity
from europa_exp.config.io import from_yaml, to_yaml
from europa_exp.config.rules import memory
from europa_exp.config.rules.values import Interval

MACHINE_BYTES = memory.machine_bytes
CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch):
    """What this machine has must not decide about tests of other rules."""
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**40)


@pytest.fixture
def found(make):
    """found("a=b", ...) -> {field: problem} of that composition."""

    def run(*overrides: str, **changes):
        cfg = make(*overrides)
        for dotted, value in changes.items():
            group, name = dotted.split("__")
            setattr(getattr(cfg, group), name, value)
        problems = check(cfg)
        for p in problems:
            assert p.rule
            assert p.way_out
            assert str(p).startswith(f"{p.field}=")
            assert len(str(p).splitlines()) == 1
        return {p.field: p for p in problems}

    return run


GOOD = [
    (),
    ("comm=fp8", "nccl=jupiter", "nccl.max_ctas=16", "nccl.min_ctas=16", "+nccl.extra.NCCL_ALGO=Ring"),
    ("nccl.record=true", "nccl.debug=TRACE", "+nccl.extra.NCCL_DEBUG_SUBSYS='env, init,TUNING'"),
    ("nccl.record=true", "+nccl.extra.NCCL_DEBUG_SUBSYS='^COLL'"),
    ("nccl.debug=WARN", "+nccl.extra.NCCL_DEBUG_SUBSYS=COLL"),
    ("data=synthetic", "data.mean_document_length=100", "model.vocab_size=2"),
    ("training.global_batch_size=24", "training.checkpoint_every=5", "training.checkpoint_keep=2"),
    ("parallelism.data_parallel_replicate_degree=2", "parallelism.data_parallel_shard_degree=2"),
    ("parallelism.expert_parallel_degree=4",),  # over two whole nodes
    ("parallelism.nodes=1", "parallelism.gpus_per_node=1", "parallelism.data_parallel_shard_degree=1", "parallelism.expert_parallel_degree=1"),
    ("tags=[a,b]", "tracking.group=g", "tracking.notes='two words'", "tracking=online"),
    ("+cluster.env.TZ=UTC", "+cluster.env.PYTHONHASHSEED=0", "+cluster.env.PYTORCH_ALLOC_CONF='a:b,c:True'"),
    ("training.loss_chunks=8", "model.rope_every=5", "model.n_long_rope_layers=0"),
    ("model=europa_1t", "parallelism=fsdp384_ep4", "offload.fsdp_cpu=true", "training.local_batch_size=1", "training.seq_len=65536",
     "cluster.device_memory_gib=89", "cluster.host_memory_gib=108"),
]  # fmt: skip


@pytest.mark.parametrize("overrides", GOOD, ids=" ".join)
def test_good_configurations_have_no_problems(found, overrides):
    assert found(*overrides) == {}


@pytest.mark.parametrize(
    "option",
    sorted(
        f"{f.parent.name}={f.stem}"
        for f in CONF.glob("*/*.yaml")
        if f.parent.name not in ("model", "parallelism")
    ),
)
def test_every_option_of_conf_is_fine_by_itself(found, option):
    if not option.startswith(("experiment=", "hydra")):
        allowed = {"cluster.account"} if option in ("cluster=jupiter", "cluster=juwels_booster") else set()
        assert set(found(option)) == allowed


BAD = [
    # what is typed, the field that is named, words of the message
    (["nccl.max_ctas=0"], "nccl.max_ctas", ["must be 1 to 64", "null"]),
    (["nccl.max_ctas=65"], "nccl.max_ctas", ["must be 1 to 64"]),
    (["nccl.max_ctas=4", "nccl.min_ctas=8"], "nccl.max_ctas", ["nccl.min_ctas=8", "8 to 64"]),
    (["nccl.ib_timeout=32"], "nccl.ib_timeout", ["1 to 31"]),
    (["nccl.socket_family=IPv4"], "nccl.socket_family", ["AF_INET, AF_INET6"]),
    (["nccl.debug=info"], "nccl.debug", ["INFO"]),
    (["nccl.socket_ifname='ib0 eth0'"], "nccl.socket_ifname", ["commas"]),
    (["nccl.ib_hca=''"], "nccl.ib_hca", ["commas"]),
    (["+nccl.extra.FOO=1"], "nccl.extra.FOO", ["NCCL_*", "cluster.env"]),
    (["+nccl.extra.NCCL_ALGO=''"], "nccl.extra.NCCL_ALGO", ["empty"]),
    (["+nccl.extra.NCCL_MAX_CTAS=3"], "nccl.extra.NCCL_MAX_CTAS", ["nccl.max_ctas=3"]),
    (["+nccl.extra.NCCL_NET=/tmp/evil.so"], "nccl.extra.NCCL_NET", ["file paths"]),
    (["nccl.record=true", "nccl.debug=WARN"], "nccl.debug", ["INFO", "nccl.record=false"]),
    (["nccl.record=true", "nccl.debug=VERSION"], "nccl.debug", ["INFO", "TRACE"]),
    (["nccl.record=true", "+nccl.extra.NCCL_DEBUG_SUBSYS='init,COLL'"], "nccl.extra.NCCL_DEBUG_SUBSYS", ["INIT and ENV"]),
    (["nccl.record=true", "+nccl.extra.NCCL_DEBUG_SUBSYS='^ENV'"], "nccl.extra.NCCL_DEBUG_SUBSYS", ["leave it out"]),
    (["nccl.record=true", "+nccl.extra.NCCL_DEBUG_SUBSYS=''"], "nccl.extra.NCCL_DEBUG_SUBSYS", ["empty"]),
    (["parallelism.expert_parallel_degree=3"], "parallelism.expert_parallel_degree", ["4 % 3 = 1", "16 % 3 = 1", "1, 2, 4"]),
    (["model.n_experts=6", "parallelism.expert_parallel_degree=4"], "parallelism.expert_parallel_degree", ["6 % 4 = 2", "1, 2."]),
    (["parallelism.nodes=3"], "parallelism.data_parallel_shard_degree", ["= 4 must be the 6 ranks", "=6 or parallelism.nodes=2"]),
    (["parallelism.data_parallel_replicate_degree=3"], "parallelism.data_parallel_replicate_degree", ["4 % 3", "1, 2, 4"]),
    (["parallelism.nodes=0"], "parallelism.nodes", ["at least 1"]),
    (["model.n_kv_heads=3"], "model.n_kv_heads", ["4 % 3 = 1", "1, 2, 4"]),
    (["model.head_dim=15"], "model.head_dim", ["even", "14 or 16"]),
    (["model.top_k=17"], "model.top_k", ["model.n_experts=16"]),
    (["model.n_long_rope_layers=3"], "model.n_long_rope_layers", ["the 2 RoPE layers", "0 to 2"]),
    (["model.rope_every=5"], "model.n_long_rope_layers", ["the 0 RoPE layers"]),
    (["model.rope_every=0"], "model.rope_every", ["at least 1"]),
    (["model.vocab_size=258"], "model.vocab_size", ["259", "data=synthetic"]),
    (["training.steps=0"], "training.steps", ["at least 1"]),
    (["training.steps=123456789012345678901234567890"], "training.steps", ["64 bits"]),
    (["training.global_batch_size=12"], "training.global_batch_size", ["2 x 4 data-parallel ranks = 8", "8 or 16"]),
    (["training.global_batch_size=3"], "training.global_batch_size", ["Take 8"]),
    (["training.loss_chunks=3"], "training.loss_chunks", ["128 % 3 = 2", "1, 2, 4"]),
    (["training.checkpoint_keep=3"], "training.checkpoint_keep", ["training.checkpoint_every=0"]),
    (["training.checkpoint_every=1", "training.checkpoint_keep=1"], "training.checkpoint_keep", ["at least 2"]),
    (["training.initial_checkpoint=nowhere"], "training.initial_checkpoint", ["no such folder", "step-100"]),
    (["training.initial_checkpoint=None"], "training.initial_checkpoint", ["training.initial_checkpoint=null"]),
    (["optimizer.lr=0"], "optimizer.lr", ["more than 0"]),
    (["optimizer.lr=nan"], "optimizer.lr", ["finite"]),
    (["optimizer.lr=inf"], "optimizer.lr", ["finite"]),
    (["optimizer.beta2=1"], "optimizer.beta2", ["less than 1"]),
    (["optimizer.decay_ratio=1.5"], "optimizer.decay_ratio", ["0 to 1"]),
    (["data.path=None"], "data.path", ["data.path=null"]),
    (["data.path=nowhere"], "data.path", ["no such folder on this machine", "another machine"]),
    (["data.path=''"], "data.path", ["no such folder"]),
    (["data=synthetic", "data.path=x"], "data.path", ["data=sample", "null"]),
    (["data.mean_document_length=5"], "data.mean_document_length", ["data=synthetic"]),
    (["tags=['']"], "tags[0]", ["empty"]),
    (["tags=[a,b,a]"], "tags[2]", ["tags[0]"]),
    (['+tags=["a","' + "b" * 65 + '"]'], "tags[1]", ["65 characters", "64"]),
    (["tracking.group=" + "g" * 129], "tracking.group", ["129 characters", "128"]),
    (["tracking.job_type=" + "j" * 65], "tracking.job_type", ["64"]),
    (["tracking.project=a/b"], "tracking.project", ["no /"]),
    (["tracking.project=''"], "tracking.project", ["empty"]),
    (["tracking.project=None"], "tracking.project", ["the word"]),
    (["launch.sweep_name=" + "s" * 129], "launch.sweep_name", ["128"]),
    (["launch.repeat=0"], "launch.repeat", ["1 to 1000"]),
    (["launch.runs_dir=''"], "launch.runs_dir", ["folder"]),
    (["+cluster.env.RANK='3'"], "cluster.env.RANK", ["launcher"]),
    (["+cluster.env.OMP_NUM_THREADS='3'"], "cluster.env.OMP_NUM_THREADS", ["cluster.threads_per_rank"]),
    (["+cluster.env.NCCL_MAX_CTAS='3'"], "cluster.env.NCCL_MAX_CTAS", ["nccl.max_ctas"]),
    (["+cluster.env.NCCL_ALGO=Ring"], "cluster.env.NCCL_ALGO", ["+nccl.extra.NCCL_ALGO"]),
    (["+cluster.env.LD_PRELOAD=x.so"], "cluster.env.LD_PRELOAD", ["other code"]),
    (["+cluster.env.PYTHONPATH=x"], "cluster.env.PYTHONPATH", ["other code"]),
    (["cluster.device_memory_gib=0"], "cluster.device_memory_gib", ["more than 0"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "field", "words"), BAD, ids=[" ".join(b[0])[:60] for b in BAD])
def test_one_mistake_is_one_problem_that_names_the_field_and_a_way_out(found, overrides, field, words):
    problems = found(*overrides)
    assert set(problems) == {field}
    for word in words:
        assert word in str(problems[field])


@pytest.mark.parametrize(
    "name", ["NET_PLUGIN", "TUNER_PLUGIN", "PROFILER_PLUGIN", "CONF_FILE", "TOPO_FILE", "GRAPH_FILE", "DEBUG_FILE",
             "TOPO_DUMP_FILE", "CUDA_PATH", "COMM_ID"]
)  # fmt: skip
def test_nccl_variables_that_reach_out_are_refused(found, name):
    problems = found(f"+nccl.extra.NCCL_{name}=x")
    assert "no plugins" in problems[f"nccl.extra.NCCL_{name}"].rule


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "FOO_PASS", "NCCL_SECRET"])
def test_a_secret_is_refused_and_not_repeated(found, name):
    problem = found(f"+cluster.env.{name}=hf_abcdef")[f"cluster.env.{name}"]
    assert str(problem).startswith(f"cluster.env.{name}=<hidden>: looks like a secret")


@pytest.mark.parametrize("setting", ["TOKENIZERS_PARALLELISM=false", "BYPASS=x", "MAX_TOKEN=512", "MONKEY=x"])
def test_what_only_sounds_like_a_secret_is_taken(found, setting):
    assert found(f"+cluster.env.{setting}") == {}


def test_all_problems_of_a_configuration_come_together(found):
    problems = found(
        "nccl.max_ctas=0", "model.n_kv_heads=3", "optimizer.lr=nan", "tags=['']", "data.path=nowhere"
    )
    assert set(problems) == {"nccl.max_ctas", "model.n_kv_heads", "optimizer.lr", "tags[0]", "data.path"}


@pytest.mark.parametrize(
    "changes",
    [
        {"training__steps": "???"},
        {"model__n_heads": "???", "parallelism__nodes": None},
        {"parallelism__expert_parallel_degree": 0, "model__n_kv_heads": 0, "training__loss_chunks": 0},
        {
            "model__rope_every": -1,
            "training__local_batch_size": 0,
            "parallelism__data_parallel_shard_degree": -4,
        },
        {"optimizer__lr": math.nan, "training__seed": True, "training__deterministic": 1},
        {"nccl__extra": {"A": 1}, "cluster__env": None, "data__source": "sample"},
        {"model__dim": 2**62, "model__vocab_size": 2**62},
        {"nccl__extra": {"NCCL_ALGO": "a\nb"}},
        {"tracking__notes": "bell\x07", "tracking__project": "a\nb", "data__path": "a\x00b"},
    ],
    ids=str,
)
def test_broken_values_are_named_and_break_no_rule(found, changes):
    problems = found(**changes)
    named = {p.replace(".", "__", 1) for p in problems}
    big = {"model__dim", "model__vocab_size"}  # fine by themselves; their bytes are what is refused
    for dotted in set(changes) - big:
        assert any(n.startswith(dotted) for n in named)
    if big & set(changes):
        assert "model.flavor" in problems


ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        [0, 1, 2**62, 2**63, 10**5000, -0.0, math.inf, "???", "None", "", "a/b", "\x00", "\ud800"]
    )
    | st.floats()
    | st.text(max_size=5)
    | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)
    | st.lists(st.text(max_size=5), max_size=2)
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from([d.field for d in describe() if "." in d.field]), ODD, max_size=4))
def test_no_value_of_any_field_breaks_a_check(make, changes):
    cfg = make()
    for dotted, value in changes.items():
        group, name = dotted.split(".")
        setattr(getattr(cfg, group), name, value)
    problems = check(cfg)
    assert len(str(ConfigError([("", p) for p in problems]))) < 20_000
    if not problems:  # what passes has a hash and a written form
        assert identity(from_yaml(to_yaml(cfg))) == identity(cfg)


def test_a_tag_list_that_is_none_is_told(make):
    cfg = make()
    cfg.tags = None
    cfg.trust = "yes"
    cfg.nccl = None
    assert {p.field for p in check(cfg)} == {"tags", "trust", "nccl"}


# --------------------------------------------------------------------------------------------------------------- memory

EUROPA = (
    "model=europa_1t",
    "parallelism=fsdp384_ep4",
    "training.seq_len=65536",
    "training.local_batch_size=1",
)


def test_a_model_too_large_for_this_machine_is_refused_with_the_numbers(found, monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 16 * 2**30)
    problem = found("model=europa_1t")["model.flavor"]
    assert "its 4 ranks need at least 14,232 GiB" in problem.rule
    assert "this machine has 16 GiB" in problem.rule
    assert "model=debug" in problem.way_out


def test_what_the_machine_does_not_tell_is_not_checked(found, monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: None)
    assert found("model=europa_1t") == {}


def test_memory_of_a_device_is_checked_where_it_is_known(found):
    problem = found(*EUROPA, "cluster.device_memory_gib=89")["cluster.device_memory_gib"]
    assert (
        "98.3 GiB on its device (state 36.9 GiB + layer inputs 55.5 GiB + one layer's experts 5.91 GiB)"
        in problem.rule
    )
    assert "training.seq_len=65536" in problem.way_out
    state = found("model=europa_1t", "parallelism=fsdp384_ep4", "cluster.device_memory_gib=20")
    assert "offload.fsdp_cpu=true" in state["cluster.device_memory_gib"].way_out


def test_offloaded_state_counts_on_the_host(found):
    on_host = (*EUROPA, "offload.fsdp_cpu=true", "cluster.device_memory_gib=89")
    assert found(*on_host, "cluster.host_memory_gib=37") == {}
    problem = found(*on_host, "cluster.host_memory_gib=36")["cluster.host_memory_gib"]
    assert "36.9 GiB on its host (state 36.9 GiB)" in problem.rule


def test_without_a_device_everything_is_on_the_host(found):
    assert found(*EUROPA, "cluster.host_memory_gib=99") == {}
    problem = found(*EUROPA, "cluster.host_memory_gib=98")["cluster.host_memory_gib"]
    assert "layer inputs" in problem.rule


def test_memory_is_left_out_while_the_ranks_do_not_fit_together(found):
    assert "model.flavor" not in found("model=europa_1t", "parallelism.nodes=3")


def test_this_machine_tells_its_memory_and_a_container_its_limit(monkeypatch):
    whole = MACHINE_BYTES()
    assert whole is None or whole > 2**28
    monkeypatch.setattr(memory.Path, "read_text", lambda *_: "1073741824\n")
    assert MACHINE_BYTES() == 2**30
    monkeypatch.setattr(memory.Path, "read_text", lambda *_: "max\n")
    assert MACHINE_BYTES() == memory.os.sysconf("SC_PHYS_PAGES") * memory.os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(memory.os, "sysconf", lambda _: (_ for _ in ()).throw(ValueError))
    assert MACHINE_BYTES() is None


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_from_elsewhere_needs_trust(found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours, theirs = tmp_path / "runs" / "r" / "checkpoints" / "step-2", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    (tmp_path / "runs" / "link").symlink_to(theirs)
    assert found(f"training.initial_checkpoint={ours}") == {}
    for outside in (theirs, tmp_path / "runs" / "link", tmp_path / "runs" / ".." / "theirs"):
        problem = found(f"training.initial_checkpoint='{outside}'")["training.initial_checkpoint"]
        assert "trust=true" in problem.way_out
        assert found(f"training.initial_checkpoint='{outside}'", "trust=true") == {}


def test_a_checkpoint_is_complete_and_leaves_steps_to_train(found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    all_of_them = tmp_path / "runs" / "r" / "checkpoints"
    for step in (8, 16):
        (all_of_them / f"step-{step}").mkdir(parents=True)
    field = "training.initial_checkpoint"
    assert ".metadata" in found(f"{field}={all_of_them}/step-8")[field].rule
    assert "step-100" in found(f"{field}={all_of_them}")[field].way_out
    for step in (8, 16):
        (all_of_them / f"step-{step}" / ".metadata").touch()
    assert "step-16" in found(f"{field}={all_of_them}")[field].way_out
    assert found(f"{field}={all_of_them}/step-8", "training.steps=9") == {}
    problem = found(f"{field}={all_of_them}/step-8", "training.steps=8")["training.steps"]
    assert "8 steps already" in problem.rule
    assert "more than 8" in problem.way_out


def test_a_checkpoint_of_another_model_is_refused(found, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "r"
    checkpoint = run / "checkpoints" / "step-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    (run / "config.yaml").write_text(to_yaml(make("comm=fp8")))
    field = "training.initial_checkpoint"
    assert found(f"{field}={checkpoint}") == {}
    problem = found(f"{field}={checkpoint}", "model.n_layers=2")[field]
    assert "model.n_layers is 4 there and 2 here" in problem.rule


def test_folder_of_texts_and_runs_dir(found, tmp_path):
    file = tmp_path / "file.txt"
    file.write_text("text")
    assert found(f"data.path={tmp_path}") == {}
    assert "is no folder" in found(f"data.path={file}")["data.path"].rule
    assert "is a file" in found(f"launch.runs_dir={file}")["launch.runs_dir"].rule


# ----------------------------------------------------------------------------------------------------------------- rest


def test_intervals():
    assert str(Interval.parse("[1, 64]")) == "1 to 64"
    assert str(Interval.parse("(0, inf)")) == "more than 0"
    assert str(Interval.parse("[0,1)")) == "at least 0 and less than 1"
    assert 0 not in Interval.parse("(0, 1]")
    assert 1 in Interval.parse("(0, 1]")
    assert math.nan not in Interval.parse("(0, inf)")
    with pytest.raises(ValueError, match="no interval"):
        Interval.parse("1-64")


def test_checking_imports_no_torch():
    code = (
        "import sys, europa_exp.config.checks, europa_exp.config.identity, europa_exp.config.fields, europa_exp.config.counts;"
        "print([m for m in ('torch', 'torchtitan', 'wandb', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.strip() == "[]"
