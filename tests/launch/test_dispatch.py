"""How runs become jobs and arrays, and what counts as submitted: without a Slurm (``tests/slurm`` has one)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launching import CODE, config, point

from europa_exp.config.schema import Executor
from europa_exp.launch import (
    already,
    arrays,
    attend_slurm,
    follow,
    slurm_exclude,
    slurm_runs,
    squeue,
    submit,
    sweep_record,
)
from europa_exp.launch.attend import Stops, report
from europa_exp.launch.slurm_runs import Life
from europa_exp.launch.slurm_submit import Handed
from europa_exp.launch.sweep_record import Record
from europa_exp.runs.folder import NewRun, RunFolder, RunFolderError, create_runs
from europa_exp.runs.slurm_record import Answer, SlurmState
from europa_exp.runs.status import State


def slurm_config(seed: int = 1, **cluster):
    cfg = config(seed=seed, preload=False, executor=Executor.slurm, name="slurm", **cluster)
    cfg.cluster.time_limit = cfg.cluster.time_limit or "00:10:00"
    return cfg


def made(runs_dir: Path, *configs, sweep: str | None = "s", code=CODE) -> list[RunFolder]:
    new = [NewRun(c, f"run{i}", point(c).identity, data_fingerprint="d") for i, c in enumerate(configs)]
    return create_runs(runs_dir, new, sweep=sweep, command=["test"], code=code)


@pytest.fixture
def answers(monkeypatch):
    """What Slurm says: a dict of job -> state, or None when it does not answer."""
    said: dict[str, str] = {}
    silent: list[str] = []

    def ask(ids, **_):
        ids = list(ids)
        if silent:
            return Answer({}, tuple(silent), known=not ids)
        return Answer({i: SlurmState(i, said[i], "squeue") for i in ids if i in said}, (), known=True)

    monkeypatch.setattr(squeue, "ask", ask)
    return said, silent


# ------------------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("MaxArraySize            = 11\nMaxJobCount = 5", 11),
        ("MaxArraySize = 1001\nSchedulerParameters = bf_interval=2,max_array_tasks=50,x", 50),
        ("MaxArraySize = 0", 1),
        ("", arrays.DEFAULT_ARRAY_SIZE),
    ],
)
def test_most_tasks_of_an_array(text, tasks):
    assert arrays._array_limit(text) == tasks


def test_the_setting_wins_over_slurm():
    cfg = slurm_config()
    cfg.launch.max_array_size = 7
    assert arrays.most_tasks(cfg.launch) == 7


def plan(tmp_path, configs, limit=1000, **launch):
    for cfg in configs:
        for name, value in launch.items():
            setattr(cfg.launch, name, value)
    runs = made(tmp_path / "runs", *configs)
    pairs = [(point(cfg), run) for cfg, run in zip(configs, runs, strict=True)]
    return arrays.plan(pairs, configs[0].launch, limit=limit, runs_dir=tmp_path / "runs")


def names(planned):
    return [[[run.name for run in task] for task in array.tasks] for array in planned]


def test_chunks_and_turns(tmp_path):
    planned = plan(tmp_path, [slurm_config(seed) for seed in range(7)], limit=2, points_per_job=2)
    assert names(planned) == [[["run0", "run1"], ["run2", "run3"]], [["run4", "run5"], ["run6"]]]
    assert len({array.folder for array in planned}) == 2


def test_shapes_stay_apart_and_keep_their_order(tmp_path):
    configs = [slurm_config(1), slurm_config(2, partition="high"), slurm_config(3)]
    assert names(plan(tmp_path, configs)) == [[["run0"], ["run2"]], [["run1"]]]


def test_chains_only_where_slurm_may_not_requeue(tmp_path):
    loose = plan(tmp_path / "a", [slurm_config(1, requeue=True, max_attempts=3)])
    chained = plan(
        tmp_path / "b",
        [
            slurm_config(1, requeue=False, max_attempts=3),
            slurm_config(2, requeue=False, max_attempts=2),
        ],
    )
    assert [array.attempts for array in loose + chained] == [1, 3]


@pytest.mark.parametrize(
    ("sizes", "throttle", "expected"),
    [
        ([11, 11, 3], 2, [0, 1, 2]),
        ([11, 11, 3], None, [0, 0, 0]),
        ([1, 1, 1, 1, 1], 2, [0, 0, 1, 1, 2]),
        ([4, 1, 1, 9], 6, [0, 0, 0, 1]),
        ([3], 1, [0]),
    ],
)
def test_arrays_take_turns_under_a_throttle(sizes, throttle, expected):
    found = arrays.turns(sizes, throttle)
    assert found == expected
    if throttle is not None:
        for turn in found:
            together = [min(size, throttle) for size, its in zip(sizes, found) if its == turn]
            assert sum(together) <= throttle


def test_slurms_words():
    text = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid\n"
    )
    assert arrays._words(text) == "invalid partition specified: x; Batch job submission failed: Invalid"


# ---------------------------------------------------------------------------------------------------- what is there


def sort(tmp_path, configs, *, sweep="s", record=None, code=CODE, force=False, key="k"):
    launch = configs[0].launch
    launch.force = force
    todo = [(point(cfg), "d") for cfg in configs]
    return already.sort_out(todo, launch, sweep, key, record, tmp_path / "runs", code)


def queued(runs, *jobs):
    for run, job_id in zip(runs, jobs, strict=True):
        run.set_state(State.queued, job_id=job_id, job_ids=[job_id] if job_id else [])


def test_living_dead_and_new(tmp_path, answers, capsys):
    answers[0].update({"7_0": "RUNNING", "7_1": "NODE_FAIL"})
    configs = [slurm_config(seed, max_attempts=2) for seed in range(4)]
    queued(made(tmp_path / "runs", *configs[:3]), "7_0", "7_1", "7_2")
    found = sort(tmp_path, configs)
    assert [run.name for _, run in found.already] == ["run0"]
    assert [o.run.name for _, o in found.again] == ["run1", "run2"]
    assert [p.cfg.training.seed for p, _ in found.fresh] == [3]
    out = capsys.readouterr().out
    assert "already submitted: run0, job 7_0, RUNNING (squeue)" in out
    assert "its job 7_1 is gone: NODE_FAIL (squeue)" in out
    assert "its job 7_2 is gone: Slurm knows it no more" in out


def test_any_job_of_a_chain_keeps_a_run_alive(tmp_path, answers):
    answers[0].update({"7": "FAILED", "8": "PENDING"})
    [run] = made(tmp_path / "runs", slurm_config())
    run.set_state(State.queued, job_id="7", job_ids=["7", "8"])
    assert sort(tmp_path, [slurm_config()]).already


@pytest.mark.parametrize("how", ["other code", "other sweep", "no attempts left"])
def test_a_dead_run_that_can_not_go_on_is_buried(tmp_path, answers, how):
    answers[0]["7"] = "NODE_FAIL"
    cfg = slurm_config(max_attempts=2)
    [run] = made(tmp_path / "runs", cfg)
    tries = [{"n": 1}, {"n": 2}] if how == "no attempts left" else []
    run.set_state(State.running, job_id="7", job_ids=["7"], attempts=tries)
    code = type(CODE)(commit=None, fingerprint="other") if how == "other code" else CODE
    found = sort(tmp_path, [cfg], sweep="t" if how == "other sweep" else "s", code=code)
    assert (len(found.fresh), len(found.again)) == (1, 0)
    assert run.status().state is State.failed
    assert "job 7 is gone: NODE_FAIL" in run.status().error["message"]


def test_a_living_run_with_other_code_is_told(tmp_path, answers, capsys):
    answers[0]["7"] = "PENDING"
    queued(made(tmp_path / "runs", slurm_config()), "7")
    found = sort(tmp_path, [slurm_config()], code=type(CODE)(commit=None, fingerprint="other"))
    assert found.already
    assert "with other code (launch.force=true submits it again)" in capsys.readouterr().out


def test_repeats_count_one_by_one(tmp_path, answers):
    answers[0].update({"7_0": "RUNNING"})
    cfg = slurm_config()
    queued(made(tmp_path / "runs", cfg), "7_0")
    found = sort(tmp_path, [cfg, cfg])
    assert (len(found.already), len(found.fresh)) == (1, 1)


def test_force_asks_for_one_more_but_not_for_the_same_broken_call_twice(tmp_path, answers):
    answers[0]["7"] = "PENDING"
    queued(made(tmp_path / "runs", slurm_config()), "7")
    assert sort(tmp_path, [slurm_config()], force=True).fresh
    record = Record(tmp_path / "s.json", "s", unfinished=["k"])
    assert sort(tmp_path, [slurm_config()], force=True, record=record).already


def test_silence_is_no_death(tmp_path, answers):
    answers[1].append("squeue: no answer in 10 s")
    queued(made(tmp_path / "runs", slurm_config()), "7")
    with pytest.raises(RunFolderError, match="Slurm does not answer"):
        sort(tmp_path, [slurm_config()])
    # A run that was never submitted needs no answer.
    queued([RunFolder(tmp_path / "runs" / "run0")], None)
    assert sort(tmp_path, [slurm_config()]).again


def test_local_runs_are_not_slurms(tmp_path, answers):
    cfg = config(name="slurm")
    [run] = made(tmp_path / "runs", cfg)
    run.set_state(State.running)
    assert slurm_runs.open_runs(tmp_path / "runs", {slurm_runs.key_of(point(cfg), "d")}) == []


def test_a_job_that_was_never_recorded_is_found_by_its_mark(tmp_path, answers):
    answers[0]["9_1"] = "RUNNING"
    [run] = made(tmp_path / "runs", slurm_config())
    folder = tmp_path / "job"
    folder.mkdir()
    for name in ("9_0", "9_1", "10_1"):
        (folder / f"{name}_submitted.pkl").touch()
    run.set_state(State.queued, job_id=None, job_folder=str(folder), job_task=1)
    assert sorted(slurm_runs.jobs_of(run, run.status())) == ["10_1", "9_1"]
    assert sort(tmp_path, [slurm_config()]).already


# ---------------------------------------------------------------------------------------------------------- the record


def test_the_record_survives_nonsense(tmp_path):
    path = sweep_record.place(tmp_path, "a sweep/with äll")
    assert path.parent == tmp_path / ".sweeps"
    path.parent.mkdir()
    for text in ("", "[1]", '{"runs": 3, "unfinished": "x"}', '{"runs": {"a": 1}}'):
        path.write_text(text)
        record = Record.read(path, "s")
        assert (record.runs, record.unfinished, record.sweep) == ({}, [], "s")
    record.unfinished.append("k")
    record.write()
    assert json.loads(path.read_text())["unfinished"] == ["k"]
    assert sweep_record.unfinished(tmp_path, "k").path == path
    assert sweep_record.unfinished(tmp_path, "other") is None


def test_two_sweeps_never_share_a_record(tmp_path):
    names = ["a b", "a_b", "a/b", "a  b", "x", "x.exclude", "äb"]
    records = {sweep_record.place(tmp_path, name) for name in names}
    lists = {slurm_exclude.place(tmp_path, name) for name in names}
    assert len(records | lists) == 2 * len(names)
    assert sweep_record.place(tmp_path, "a_b").name == "a_b.json", "a plain name stays readable"


def test_a_call_is_known_by_its_runs_and_not_by_its_code_or_order(tmp_path):
    points = [point(slurm_config(seed)) for seed in (1, 2)]
    key = sweep_record.call_key(points, ["d", "d"])
    assert sweep_record.call_key(points[::-1], ["d", "d"]) == key
    assert sweep_record.call_key(points[:1], ["d"]) != key
    assert sweep_record.call_key(points, ["d", "e"]) != key


def test_life_without_an_answer_from_sacct(tmp_path):
    silent = Answer({}, ("sacct: there is no such command here",), known=True)
    assert slurm_runs._life(["7"], silent)[0] is Life.dead
    assert slurm_runs._life(["7"], Answer({}, ("squeue: down",), known=False))[0] is Life.unclear


def test_one_call_goes_to_one_place(tmp_path):
    mixed = [point(config(), "a"), point(slurm_config(), "b")]
    with pytest.raises(submit.ConfigError, match="one call goes to one place"):
        submit.submit(mixed, mixed[0].cfg.launch, sweep="s", command=["test"])


def test_a_path_that_slurm_misreads(tmp_path):
    cfg = slurm_config()
    cfg.launch.runs_dir = str(tmp_path / "100%j")
    with pytest.raises(RunFolderError, match="Slurm takes % in the path"):
        submit.submit([point(cfg)], cfg.launch, sweep=None, command=["test"])
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------- watching


def test_a_vanished_job_is_believed_the_second_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attend_slurm, "FIRST_ASK_S", 0)
    monkeypatch.setattr(attend_slurm, "CONFIRM_S", 0)
    answer = Answer({"7": SlurmState("7", "NODE_FAIL", "sacct")}, (), known=True)
    monkeypatch.setattr(
        "europa_exp.launch.standing.survey.__kwdefaults__", {"ask": lambda _: answer, "slurm": None}
    )
    [run] = made(tmp_path / "runs", slurm_config())
    run.set_state(State.running, job_id="7", job_ids=["7"])
    said: list[str] = []
    watch = attend_slurm.Watch([follow.Row(run, 3)], said.append)
    assert watch.going_on()
    assert run.status().state is State.running
    assert watch.going_on()
    assert run.status().state is State.failed
    assert "NODE_FAIL" in run.status().error["message"]
    assert not watch.going_on()


def test_a_rank_that_is_left_can_still_change_the_end(tmp_path, answers, monkeypatch):
    monkeypatch.setattr(attend_slurm, "_LINGER_EVERY_S", 0)
    answers[0]["7"] = "RUNNING"
    [run] = made(tmp_path / "runs", slurm_config())
    run.set_state(State.completed, job_id="7", job_ids=["7"])
    said: list[str] = []
    row = follow.Row(run, 3)
    watch = attend_slurm.Watch([row], said.append)
    assert watch.going_on()
    run.set_state(State.failed)
    answers[0]["7"] = "COMPLETING"
    assert not watch.going_on()
    assert row.status.state is State.failed
    # A job that never ends does not hold the command for ever.
    answers[0]["7"] = "RUNNING"
    monkeypatch.setattr(attend_slurm, "LINGER_S", -1)
    assert not attend_slurm.Watch([row], said.append).going_on()
    assert said == ["job 7 still runs, though its runs are over"]


# ----------------------------------------------------------------------------------------------------- what to type next


def handed_over(*runs: RunFolder) -> Handed:
    return Handed(0, [(point(run.config()), run) for run in runs])


def of_sweep(runs_dir: Path, sweep: str | None, name: str, seed: int) -> RunFolder:
    cfg = slurm_config(seed)
    cfg.launch.runs_dir = str(runs_dir)
    new = NewRun(cfg, name, point(cfg).identity)
    return create_runs(runs_dir, [new], sweep=sweep, command=["test"], code=CODE)[0]


def suggested(text: str) -> list[list[str]]:
    """The words that bash makes of each command after a colon."""
    lines = [
        line.partition(": ")[2] for line in text.splitlines() if line.startswith(("Next: ", "To cancel: "))
    ]
    shells = [["bash", "-c", f"printf '%s\\0' {line}"] for line in lines]
    return [subprocess.check_output(shell, text=True).split("\0")[:-1] for shell in shells]


def test_the_sweep_of_the_runs_is_named_or_the_runs_are(tmp_path, monkeypatch, capsys):
    """A call may meet runs of an earlier one: their sweep is the one there is."""
    monkeypatch.chdir(tmp_path)
    first, second = of_sweep(Path("runs"), "old", "a", 1), of_sweep(Path("runs"), "old", "b", 2)
    third, alone = of_sweep(Path("runs"), "new", "c", 3), of_sweep(Path("runs"), None, "d", 4)
    for runs, which in (
        ([first, second], ["--sweep", "old"]),
        ([first, third], ["a", "c"]),
        ([alone], ["d"]),
        ([first, alone], ["a", "d"]),
    ):
        attend_slurm.say_next(handed_over(*runs), runs[0].config().launch)
        assert suggested(capsys.readouterr().out) == [
            ["europa", "status", *which, "--watch"],
            ["europa", "cancel", *which],
        ]


def test_the_report_compares_what_was_attended(tmp_path, monkeypatch, capsys, answers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("europa_exp.launch.attend.print_comparison", lambda *_: None)
    runs = [of_sweep(Path("runs"), sweep, name, i) for i, (sweep, name) in enumerate(["oa", "ob", "nc"])]
    again = of_sweep(Path("runs"), None, "a-r2", 0)
    for run in (*runs, again):
        run.set_state(State.completed)
    hashed = str(again.provenance()["identity"])
    for attended, which in (
        (runs[:2], ["--sweep", "o"]),
        (runs, ["a", "b", "c"]),
        ([runs[0], again], [hashed]),
    ):
        handed = handed_over(*attended)
        assert attend_slurm.attend(handed, attended[0].config().launch, Stops()) == 0
        assert suggested(capsys.readouterr().out) == [["europa", "compare", *which]]


@pytest.mark.parametrize("folder", ["ch", "their $(touch x); runs"])
def test_what_is_suggested_is_safe_to_paste(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    sweep = "a b %j $(touch x) ; x"
    run = of_sweep(Path(folder), sweep, "run0", 1)
    attend_slurm.say_next(handed_over(run), run.config().launch)
    for state in (State.failed, State.completed):
        run.set_state(state)
        rows = [follow.Row(run, 3), follow.Row(RunFolder(run.path), 3)]
        for row in rows:
            row.refresh()
        report(rows, 1.0, interrupted=True)
    assert suggested(capsys.readouterr().out) == [
        ["europa", "status", "--sweep", sweep, "--watch", "--runs-dir", folder],
        ["europa", "cancel", "--sweep", sweep, "--runs-dir", folder],
        ["europa", "why", "run0", "--runs-dir", folder],
        ["europa", "compare", "--sweep", sweep, "--runs-dir", folder],
    ]
    assert not Path("x").exists()
