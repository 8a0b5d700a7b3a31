"""Small training entries for jobs of the tests on a virtual Slurm. Those without torch start in a moment."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path

from europa_exp.runs.metrics import MetricsWriter


def rank() -> int:
    return int(os.environ["RANK"])


def attempt() -> int:
    """0 at the first start of the job, and one more with each requeue."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def cpu_seconds() -> dict[str, float]:
    """CPU seconds that this rank and the task that watches over it have used so far, in the code and in the kernel."""
    me = os.times()
    # After the command in brackets, which may hold anything: fields 14 and 15, utime and stime, in ticks.
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return {"user": me.user + int(fields[11]) / tick, "system": me.system + int(fields[12]) / tick}


def write_steps(cfg, run, runtime) -> None:
    """Rank 0 logs ``training.steps`` steps."""
    if rank() == 0:
        with MetricsWriter(run.metrics_file) as writer:
            for step in range(1, cfg.training.steps + 1):
                writer.write({"loss/global_avg": 1.0 / step, "training/seed": cfg.training.seed}, step)


def report_environment(cfg, run, runtime) -> None:
    """Each rank writes its environment, its host and its process."""
    place = run.path / "ranks"
    place.mkdir(exist_ok=True)
    found = {**os.environ, "pid": str(os.getpid()), "cpu": json.dumps(cpu_seconds())}
    (place / f"{os.environ['SLURM_PROCID']}.json").write_text(json.dumps(found))
    write_steps(cfg, run, runtime)


def report_code(cfg, run, runtime) -> None:
    """Where the code of the job comes from, with what a module says that is in no commit."""
    import europa_exp
    from europa_exp import new_module  # type: ignore[attr-defined]
    from europa_exp.launch import points  # noqa: F401

    if rank() == 0:
        found = {"file": europa_exp.__file__, "new_module": new_module.VALUE, "seed": cfg.training.seed}
        (run.path / "code.json").write_text(json.dumps(found))
    write_steps(cfg, run, runtime)


def fail_when_marked(cfg, run, runtime) -> None:
    """Rank 1 of the run with seed 13 fails; its peer waits for it, as it would in a collective."""
    if cfg.training.seed == 13:
        if rank() == 1:
            raise RuntimeError("unlucky seed 13")
        time.sleep(600)
    write_steps(cfg, run, runtime)


def take_a_second(cfg, run, runtime) -> None:
    """Rank 0 leaves a line with when it began and ended; with seed 7 it dies of a segmentation fault in its first attempt."""
    begin = time.time()
    time.sleep(1)
    if rank() == 0:
        with open(run.path / "times", "a") as file:
            file.write(f"{begin} {time.time()}\n")
    if cfg.training.seed == 7 and attempt() == 0:
        ctypes.string_at(0)
    write_steps(cfg, run, runtime)


def raise_on_1(cfg, run, runtime) -> None:
    stay(cfg, run, runtime, fail=1)


def raise_late_on_1(cfg, run, runtime) -> None:
    """Rank 0 is done at once; rank 1 fails when its peer has gone already."""
    if rank() == 1:
        time.sleep(3)
        raise ValueError("too late to be seen by rank 0")


def stay(cfg, run, runtime, fail=None) -> None:
    """Say that the rank is up, with its process id, and stay."""
    (run.path / f"up_{rank()}").write_text(str(os.getpid()))
    if rank() == fail:
        raise ValueError("the third step is bad")
    time.sleep(600)


def slow_then_fast(cfg, run, runtime) -> None:
    """The real training; each step after the fourth takes four seconds longer in the job's first attempt.

    So a test can interrupt that attempt in the middle, and the next one does not take long.
    """
    from europa_exp.training import train, trainer

    original = trainer.Trainer.train_step

    def train_step(self, *args, **kwargs):
        if attempt() == 0 and self.step > 4:
            time.sleep(4)
        return original(self, *args, **kwargs)

    trainer.Trainer.train_step = train_step  # type: ignore[method-assign]
    train(cfg, run, runtime)


def wait_to_be_asked(cfg, run, runtime) -> None:
    """The real training; after the fourth step of the job's first attempt each rank waits until it is asked to stop."""
    from europa_exp.training import train, trainer

    original, asked = trainer.Trainer.train_step, runtime["stop"]

    def train_step(self, *args, **kwargs):
        while attempt() == 0 and self.step > 4 and not asked():
            time.sleep(0.1)
        return original(self, *args, **kwargs)

    trainer.Trainer.train_step = train_step  # type: ignore[method-assign]
    train(cfg, run, runtime)
