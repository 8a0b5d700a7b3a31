"""submitit's Slurm executor with three changes: ranks start light, a job leaves two files of output however many ranks it has,
and the script can be seen without submitting it.

submitit has public names for neither; this is the only place that uses its private ones. Import it late: submitit takes its
time.
"""

from __future__ import annotations

import shlex

from submitit.slurm.slurm import SlurmExecutor

ENTRY = "europa_exp.launch.slurm_start"


class Executor(SlurmExecutor):
    """Writes scripts, submits them, and finds out the ids of the jobs; what a task does is in ``slurm_start``."""

    def __init__(self, folder: str, *, python: str) -> None:
        super().__init__(folder, python=python)
        # submitit's srun has a file for each task. Ranks keep logs of their own; the little that comes before is for the script's.
        # submitit's wckey is its own name, and sites that keep accounts by wckey refuse one that they don't know.
        self.update_parameters(use_srun=False, wckey=None)

    @property
    def _submitit_command_str(self) -> str:
        srun = shlex.join(["srun", "--label", *self.parameters.get("srun_args", ())])
        return f"{srun} {self.python} -u -m {ENTRY} {shlex.quote(str(self.folder))}"

    @classmethod
    def affinity(cls) -> int:
        """Above 0, as for a machine with srun: a script can be written anywhere."""
        return 2

    def text(self, n_jobs: int = 1) -> str:
        """The script that sbatch gets for ``n_jobs`` jobs (several make one array)."""
        before = dict(self.parameters)
        try:
            if n_jobs > 1:
                self.parameters["map_count"] = n_jobs
            return self._make_submission_file_text(self._submitit_command_str, "")
        finally:
            self.parameters.clear()
            self.parameters.update(before)
