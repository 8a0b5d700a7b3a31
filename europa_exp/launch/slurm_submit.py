"""Handing points to Slurm: what is there already is left alone, what broke off is completed, nothing is doubled."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from europa_exp.config import schema
from europa_exp.launch import arrays, slurm, slurm_exclude, slurm_runs, snapshot, sweep_record
from europa_exp.launch.already import Sorted, Todo, sort_out
from europa_exp.launch.attend import INTERRUPTED, Stops
from europa_exp.launch.slurm_journal import Journal
from europa_exp.launch.sweep_record import Record
from europa_exp.runs.folder import NewRun, RunFolder, RunFolderError, create_runs

if TYPE_CHECKING:
    from europa_exp.launch.points import Point
    from europa_exp.launch.slurm_runs import OpenRun
    from europa_exp.runs.provenance import CodeState

FAILED = 1
"""Exit code when Slurm did not take all of it."""


@dataclass
class Handed:
    """What came of a submission. ``runs`` are pairs of all points of the call that are, or were, with Slurm; those that were
    there before belong to the sweep of the call that created them."""

    code: int = 0
    runs: list[tuple[Point, RunFolder]] = field(default_factory=list)


def submit(
    points: Todo,
    todo: Todo,
    launch: schema.Launch,
    *,
    sweep: str | None,
    command: Sequence[str],
    entry: str,
    code: CodeState,
    stops: Stops,
) -> Handed:
    """Submit ``todo``, the part of the call's ``points`` that has no completed run. Says what happened.

    A point whose run waits or runs in a living job of Slurm's is submitted already. A run of the same sweep and code whose
    job is gone is submitted again, in its folder. When Slurm refuses one of several jobs, those before it stay, and the folders
    of the others are removed; the same call completes it. Raises RunFolderError when nothing can be submitted at all.
    """
    runs_dir = Path(launch.runs_dir).absolute()
    if "%" in str(runs_dir):
        raise RunFolderError(
            f"launch.runs_dir={launch.runs_dir}: Slurm takes % in the path of a log for a pattern; choose another folder"
        )
    with sweep_record.alone(runs_dir, lambda: bool(stops.count)):
        key = sweep_record.call_key([p for p, _ in points], [f for _, f in points])
        record: Record | None = None
        if sweep is not None and launch.sweep_name is None:
            record = sweep_record.unfinished(runs_dir, key)
        if record is not None:
            sweep = record.sweep
            print(f"continuing sweep {sweep}, whose submission broke off")
        elif sweep is not None:
            record = Record.of(runs_dir, sweep)
        sorted_out = sort_out(todo, launch, sweep, key, record, runs_dir, code)
        handed = Handed(0, list(sorted_out.already))
        if not (sorted_out.fresh or sorted_out.again):
            if record is not None and key in record.unfinished:
                record.unfinished.remove(key)
                record.write()
            return handed
        imports = _code_of_the_job(launch, runs_dir, code)
        return _Submission(launch, sweep, command, entry, code, imports, key, record, stops).go(
            sorted_out, handed
        )


def _code_of_the_job(launch: schema.Launch, runs_dir: Path, code: CodeState) -> Path | None:
    """The folder that the job imports, if it is a frozen one."""
    if not launch.snapshot:
        print(f"note: the jobs import {slurm.ROOT} as it is when they start; launch.snapshot=true freezes it")
        return None
    from europa_exp.runs.code import code_state

    try:
        taken = snapshot.take(slurm.ROOT, runs_dir / snapshot.CODE_FOLDER)
    except snapshot.SnapshotError as error:
        raise RunFolderError(str(error)) from error
    if code_state().fingerprint != code.fingerprint:
        raise RunFolderError(
            "launch.snapshot=true: the code changed while it was being frozen; nothing was submitted. Submit again"
        )
    for text in taken.left_out:
        print(f"note: not in the snapshot: {text}", file=sys.stderr)
    return taken.path


# ------------------------------------------------------------------------------------------------------ the submission


class _Submission:
    def __init__(
        self,
        launch: schema.Launch,
        sweep: str | None,
        command: Sequence[str],
        entry: str,
        code: CodeState,
        imports: Path | None,
        key: str,
        record: Record | None,
        stops: Stops,
    ) -> None:
        self._launch, self._sweep, self._command = launch, sweep, command
        self._entry, self._code, self._imports, self._key = entry, code, imports, key
        self._record, self._stops = record, stops
        self._runs_dir = Path(launch.runs_dir).absolute()

    def go(self, todo: Sorted, handed: Handed) -> Handed:
        fresh = self._create(todo)
        pairs = [*zip([p for p, _ in todo.fresh], fresh, strict=True), *((p, o.run) for p, o in todo.again)]
        taken: set[RunFolder] = set()
        _tell_left_out(pairs[0][1])
        # The record of a single run, which belongs to no sweep, is never written.
        record = self._record or Record.read(sweep_record.place(self._runs_dir, pairs[0][1].name))
        journal = Journal(record, self._key)
        try:
            planned = self._prepare(pairs, [o for _, o in todo.again], journal)
            refusal = self._submit(planned, taken, journal)
        except BaseException as error:
            journal.take_back([run for _, run in pairs if run not in taken], fresh)
            if isinstance(error, OSError):
                raise RunFolderError(
                    f"launch.runs_dir={self._launch.runs_dir}: the submission can't be recorded there ({error}); "
                    + (f"{len(taken)} runs were submitted" if taken else "nothing was submitted")
                ) from error
            raise
        left = [run for _, run in pairs if run not in taken]
        journal.take_back(left, fresh)
        handed.runs += [(point, run) for point, run in pairs if run in taken]
        jobs = {str(record.runs[run.name]["job_id"]).partition("_")[0] for run in taken}
        if taken:
            words = "job" if len(jobs) == 1 else "jobs"
            print(
                f"{f'sweep {self._sweep}, ' if self._sweep else ''}{_count(len(taken), 'run')} in "
                f"{os.path.relpath(self._runs_dir)} submitted as Slurm {words} {', '.join(sorted(jobs, key=int))}"
            )
        if left:
            handed.code = INTERRUPTED if self._stops.count else FAILED
            self._tell(refusal, planned, taken, left, handed)
        return handed

    def _create(self, todo: Sorted) -> list[RunFolder]:
        imports = {"path": str(self._imports or slurm.ROOT), "frozen": self._imports is not None}
        new = [
            NewRun(p.cfg, p.name, p.identity, p.overrides, p.repeat, p.parent, fingerprint, imports)
            for p, fingerprint in todo.fresh
        ]
        return create_runs(
            self._launch.runs_dir, new, sweep=self._sweep, command=self._command, code=self._code
        )

    def _prepare(
        self, pairs: Sequence[tuple[Point, RunFolder]], again: Sequence[OpenRun], journal: Journal
    ) -> list[arrays.Array]:
        """The arrays to submit, recorded as what is about to be done."""
        broke_off = [
            Path(str(o.status.extra["job_folder"]))
            for o in again
            if not o.jobs and "job_folder" in o.status.extra
        ]
        arrays.cancel_unrecorded(broke_off)
        planned = arrays.plan(
            pairs, self._launch, limit=arrays.most_tasks(self._launch), runs_dir=self._runs_dir
        )
        journal.open(planned, again)
        return planned

    def _submit(self, planned: Sequence[arrays.Array], taken: set[RunFolder], journal: Journal) -> str | None:
        """Submit array after array; ``taken`` grows. Returns why it stopped before the last, if it did."""
        by_turn: dict[int, list[str]] = {-1: self._jobs_before(journal.others(planned))}
        self._tell_turns(planned, by_turn[-1])
        for array in planned:
            if self._stops.count:
                return "interrupted"
            name = self._sweep or array.runs[0].name
            try:
                ids = arrays.submit(
                    array,
                    self._launch,
                    name=name,
                    entry=self._entry,
                    code=self._imports,
                    behind=by_turn[array.turn - 1],
                )
            except arrays.Refused as error:
                # Interrupted, or timed out, sbatch may have got through all the same.
                arrays.cancel_unrecorded([array.folder])
                return "interrupted" if self._stops.count else str(error)
            taken.update(array.runs)
            journal.took(array)
            chain = [ids, *self._chain(array, name, ids)]
            by_turn.setdefault(array.turn, []).extend(job for jobs in chain for job in jobs[:1])
            journal.note(array, chain)
        journal.close()
        return None

    def _jobs_before(self, others: Sequence[str]) -> list[str]:
        """The jobs of earlier calls that work on the same sweep and are not over: ``launch.throttle`` holds for all of it."""
        return slurm_runs.living_jobs(self._runs_dir, others) if self._launch.throttle is not None else []

    def _tell_turns(self, planned: Sequence[arrays.Array], before: Sequence[str]) -> None:
        turns = planned[-1].turn + 1
        limit = f"note: launch.throttle={self._launch.throttle} holds for the whole sweep:"
        if before:
            jobs = ", ".join(dict.fromkeys(job.partition("_")[0] for job in before))
            print(f"{limit} these runs wait until job {jobs} has ended")
        if turns > 1:
            print(f"{limit} its {len(planned)} arrays run in {turns} turns, one after the other")

    def _chain(self, array: arrays.Array, name: str, ids: list[str]) -> list[list[str]]:
        """The jobs that wait to continue an array where Slurm may not start it again."""
        chain: list[list[str]] = []
        for attempt in range(2, array.attempts + 1):
            after = (chain[-1] if chain else ids)[0].partition("_")[0]
            try:
                chain.append(
                    arrays.submit(
                        array, self._launch, name=name, entry=self._entry, code=self._imports, after=after
                    )
                )
            except arrays.Refused as error:
                print(
                    f"Slurm refused the job for attempt {attempt} of {array.runs[0].name}: {error}\n"
                    f"The runs go on; {'one attempt' if attempt == 2 else f'{attempt - 1} attempts'} must do.",
                    file=sys.stderr,
                )
                break
        return chain

    def _tell(
        self,
        refusal: str | None,
        planned: Sequence[arrays.Array],
        taken: Collection[RunFolder],
        left: Sequence[RunFolder],
        handed: Handed,
    ) -> None:
        if self._stops.count:
            print("Interrupted while submitting.", file=sys.stderr)
        else:
            at = next(i for i, array in enumerate(planned) if array.runs[0] not in taken)
            refused = planned[at]
            which = f"job {at + 1} of {len(planned)}" if len(planned) > 1 else "the job"
            names = refused.runs[0].name + (
                f" and {len(refused.runs) - 1} more" if len(refused.runs) > 1 else ""
            )
            layout = refused.cfg.parallelism
            print(
                f"Slurm refused {which} ({names}; {layout.nodes} x {layout.gpus_per_node} ranks): {refusal}",
                file=sys.stderr,
            )
        there = len(handed.runs)
        if not there:
            print("Nothing was submitted; no run folder was left.", file=sys.stderr)
            return
        print(
            f"{_count(len(left), 'run')} of {there + len(left)} not submitted, their folders removed; the others go on.\n"
            "The same command, typed again, submits the rest and doubles nothing.",
            file=sys.stderr,
        )


def _tell_left_out(run: RunFolder) -> None:
    """The nodes that the jobs will not get because an earlier one of the sweep found them bad."""
    path = slurm_exclude.place_of(run)
    entries = slurm_exclude.entries(path)
    for entry in entries:
        print(f"note: {entry['node']} is left out since {entry.get('date')}: {entry.get('reason')}")
    if entries:
        print(f"note: without its entry in {os.path.relpath(path)} a node can be had again")


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
