"""Nodes that a sweep leaves out: what sbatch is told, and the jobs that wait. (``tests/slurm`` has a real Slurm.)"""

from __future__ import annotations

import json

import pytest
from compose import composed
from launching import config, make_runs

from europa_exp.launch import slurm, slurm_exclude, squeue
from europa_exp.launch.sweep_record import Record, place


@pytest.mark.parametrize(
    ("overrides", "bad", "expected"),
    [
        ([], [], None),
        ([], ["n2", "n1"], "n2,n1"),
        (["cluster.exclude='n[1-3],m'"], ["n2", "n4", "n4"], "n[1-3],m,n4"),
        (["cluster.exclude='n[1-3],m'"], [], "n[1-3],m"),
        (["cluster.nodelist='n[1-2]'"], ["n2", "n3"], "n3"),
    ],
)
def test_bad_nodes_come_to_those_of_the_configuration(overrides, bad, expected):
    cfg = composed("cluster=slurm", *overrides)
    parameters = slurm.sbatch_parameters(cfg, cfg.launch, name="n", bad_nodes=list(dict.fromkeys(bad)))
    assert parameters.get("exclude") == expected


def test_the_script_of_a_preview_leaves_them_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slurm_exclude.add(slurm_exclude.place(tmp_path / "runs", "mine"), {"n7": "little memory"})
    from composing import call

    out = call(
        "-m", "cluster=slurm", "launch.sweep_name=mine", "nccl.max_ctas=8,16", "launch.preview=script"
    ).out
    assert "#SBATCH --exclude=n7\n" in out


def test_bad_nodes_of_a_sweep_come_together(tmp_path):
    path = tmp_path / ".sweeps" / "s.exclude.json"
    assert slurm_exclude.entries(path) == []
    assert slurm_exclude.add(path, {"n2": "little memory"}) == ["n2"]
    assert slurm_exclude.add(path, {"n1": "less", "n2": "again"}) == ["n2", "n1"]
    entries = json.loads(path.read_text())
    assert [(e["node"], e["reason"]) for e in entries] == [("n2", "little memory"), ("n1", "less")]
    assert all(e["date"] for e in entries)
    path.write_text("{ broken")
    assert slurm_exclude.add(path, {"n3": "x"}) == ["n3"]


@pytest.fixture
def queue(monkeypatch):
    """The lines that squeue prints (the node lists of one may be changed by scontrol), and what scontrol was asked."""

    class Queue:
        lines: list[list[str]] = []
        asked: list[str] = []
        refuse = False

        def run(self, command, timeout=0.0):
            if command[0] == "squeue":
                return "".join("|".join(line) + "\n" for line in self.lines)
            self.asked.append(" ".join(command))
            number, nodes = (part.partition("=")[2] for part in command[2:])
            if self.refuse:
                return squeue.Refused("Access/permission denied")
            for line in self.lines:
                if line[0] == number:
                    line[1] = nodes
            return squeue.Refused("70_1-2: No error")

    found = Queue()
    found.lines, found.asked = [], []
    monkeypatch.setattr(squeue, "run", found.run)
    return found


@pytest.fixture
def run(tmp_path):
    [run] = make_runs(tmp_path / "runs", config())
    run.note(job_folder="/r/.submitit/one")
    record = Record(place(tmp_path / "runs", "s"), "s", {run.name: {"folder": "/r/.submitit/one"}})
    record.runs["gone"] = {"folder": "/r/.submitit/two"}
    record.path.parent.mkdir()
    record.write()
    return run


def test_waiting_jobs_of_the_sweep_leave_them_out_and_keep_their_own(queue, run):
    queue.lines = [
        ["70", "", "", "/r/.submitit/one/submission.sh"],
        ["71", "n[1-2]", "n8", "/r/.submitit/two/a | b.sh"],
        ["71", "n[1,5]", "", "/r/.submitit/two/a | b.sh"],
        ["72", "n[7-9]", "", "/r/.submitit/two/submission.sh"],
        ["73", "", "", "/r/.submitit/another/submission.sh"],
        ["74", "", "n[7-8]", "/r/.submitit/one/submission.sh"],
    ]
    assert slurm_exclude.tell_waiting(run, ["n7", "n8"]) == []
    assert queue.asked == [
        "scontrol update JobId=70 ExcNodeList=n7,n8",
        "scontrol update JobId=71 ExcNodeList=n1,n2,n5,n7",
    ]


def test_what_slurm_refuses_is_told(queue, run):
    queue.lines = [["70", "", "", "/r/.submitit/one/submission.sh"]]
    queue.refuse = True
    assert slurm_exclude.tell_waiting(run, ["n7"]) == ["job 70: Access/permission denied"]


def test_a_run_without_a_sweep_has_a_list_of_its_own(tmp_path, run):
    assert slurm_exclude.place_of(run) == tmp_path / "runs" / ".sweeps" / "s.exclude.json"
    origin = json.loads((run.path / "provenance.json").read_text())
    (run.path / "provenance.json").write_text(json.dumps(origin | {"sweep": None}))
    assert slurm_exclude.place_of(run).name == f"{run.name}.exclude.json"
    assert slurm_exclude.listed(slurm_exclude.place_of(run)) == []
