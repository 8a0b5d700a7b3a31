"""torchtitan's checkpoint manager with a rule of what is kept, and a start from nothing that isn't taken for going on."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import TRAIN_STATE, CheckpointManager
from torchtitan.tools.logging import logger

from europa_exp.config.errors import ConfigError
from europa_exp.config.rules.checkpoints import no_step_left
from europa_exp.cpu import device
from europa_exp.runs import checkpoints
from europa_exp.runs.folder import RunFolder, RunFolderError


class KeepingCheckpointManager(CheckpointManager):
    """A ``CheckpointManager`` that keeps what ``checkpoints.stale`` says, and knows what the run has saved.

    Upstream counts the newest folders, those that were cut included, and removes none after the last save. To be dropped when
    its retention has a ``keep_every`` beside ``keep_latest_k`` and counts finished checkpoints only (torchtitan 0.3.0 has not).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        keep_every: int = 0
        """Checkpoints whose step is a multiple of it are never removed; 0 for none."""

        steps: int
        """The last step of the run; an initial checkpoint must be older."""

    def __init__(self, config: Config, *, base_folder: str = "", **parts: Any) -> None:
        self._run = RunFolder(base_folder)
        self._keep_every, self._steps = config.keep_every, config.steps
        self._writing: int | None = None
        self._swept = False
        super().__init__(config, base_folder=base_folder, **parts)
        self._is_first = dist.get_rank() == 0
        if self._is_first and not self.load_only:
            checkpoints.make_place(self._run, Path(self.folder))

    # ------------------------------------------------------------------------------------------------------ loading

    def _load(self, step: int = -1) -> bool:
        """Load the newest checkpoint of the run whose files are all there, else the initial one.

        Raises:
            RunFolderError: what the run had saved is gone, or the checkpoint lacks files.
            ConfigError: the initial checkpoint has trained all the steps of this run already.
        """
        newest = self._agreed_step()
        if newest is not None:
            step, source = newest, Path(self.folder) / f"step-{newest}"
            way_out = "Start the run again, and it goes on from an older one"
        else:
            source, way_out = self.initial_load_path, "Give another training.initial_checkpoint"
            self._check_initial()
        try:
            return super()._load(step)
        except CheckpointException as error:
            lacking = [e for e, _ in error.failures.values() if isinstance(e, FileNotFoundError)]
            if not lacking:
                raise
            raise RunFolderError(
                f"{source}: the checkpoint is not whole any more, {lacking[0].filename} is missing (a folder on scratch is "
                f"cleaned by the site). {way_out}"
            ) from error

    def _agreed_step(self) -> int | None:
        """The step that all ranks go on from, as rank 0 finds it; None for a run that saved nothing yet.

        Raises RunFolderError, on every rank.
        """
        said: list[Any] = [None, None]
        if self._is_first:
            try:
                said[0] = self._newest_with_all_files()
            except RunFolderError as error:
                said[1] = str(error)
        dist.broadcast_object_list(said, 0)
        if said[1] is not None:
            raise RunFolderError(said[1])
        return said[0]

    def _newest_with_all_files(self) -> int | None:
        """Where to go on from; says what is lost, and takes damaged checkpoints that are newer out of the way."""
        folder = Path(self.folder)
        damaged: dict[int, str] = {}
        while (newest := checkpoints.resume_step(self._run, folder, damaged)) is not None:
            if not (what := _damage(folder / f"step-{newest}")):
                break
            damaged[newest] = what
        if newest is None:
            return None
        lost = []
        if (saved := checkpoints.newest_saved(self._run) or newest) > max((newest, *damaged)):
            lost.append(f"step {saved} was saved and is gone")
        for checkpoint in checkpoints.found(folder):
            if checkpoint.step in damaged:
                try:
                    aside = checkpoints.leave_out(checkpoint)
                except OSError as error:
                    raise RunFolderError(
                        f"{checkpoint.path}: the checkpoint {damaged[checkpoint.step]} and can't be moved out of the way "
                        f"({error.strerror or error}). Remove it, and the run goes on from step {newest}"
                    ) from error
                lost.append(
                    f"step-{checkpoint.step} {damaged[checkpoint.step]}, and is left out as {aside.name}"
                )
        if lost:
            logger.warning(f"{folder}: {'; '.join(lost)}; going on from step {newest}")
        return newest

    def _check_initial(self) -> None:
        """Upstream trains nothing from a checkpoint of the last step, and fails in the schedule with a later one."""
        if self.initial_load_path is None:
            return
        step = torch.full((), -1, device=device.device_type(), dtype=torch.int64)
        if self._is_first:
            step.fill_(_step_of(self.initial_load_path))
        dist.broadcast(step, 0)
        if int(step) >= self._steps:
            raise ConfigError([("", no_step_left(self._steps, self.initial_load_path, int(step)))])

    # ------------------------------------------------------------------------------------------------------- saving

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._should_save(curr_step, last_step):
            self._writing = curr_step
        if not super()._save(curr_step, last_step):
            return False
        if self.save_future is not None:
            self.save_future.add_done_callback(lambda done: self._note(curr_step, done))
            return True
        self._note(curr_step)
        if last_step:
            self._purge_stale_checkpoints()
        return True

    def _wait_for_saving(self) -> None:
        super()._wait_for_saving()
        # Upstream removes when a save begins, which leaves one more than the rule keeps once it has ended.
        self._purge_stale_checkpoints()

    def _note(self, step: int, done: Future | None = None) -> None:
        """Remember in the run folder that a checkpoint is finished; trouble with that stops no training."""
        if not self._is_first or (done is not None and done.exception() is not None):
            return
        try:
            checkpoints.note_saved(self._run, step)
        except OSError as error:
            logger.warning(f"that step {step} is saved can't be recorded: {error}")

    def _purge_stale_checkpoints(self) -> None:
        """Take what may go out of the way, and have it removed in the background; trouble with that stops no training."""
        if not self._should_purge():
            return
        folder = Path(self.folder)
        if not self._swept:
            self._swept = True
            for path in checkpoints.half_removed(folder):
                self.purge_queue.put(str(path))
        known = checkpoints.found(folder)
        for old in checkpoints.stale(
            known, keep=self.keep_latest_k, keep_every=self._keep_every, writing=self._writing
        ):
            try:
                self.purge_queue.put(str(checkpoints.set_aside(old)))
            except OSError as error:
                logger.warning(f"{old.path} can't be removed: {error}")


def _damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint that was finished, in words; empty if its data files are all there.

    Reads its metadata and lists its folder, and touches no data file.
    """
    try:
        stored = FileSystemReader(checkpoint).read_metadata().storage_data
        files = {info.relative_path for info in stored.values()}
        missing = files.difference(os.listdir(checkpoint))
    except Exception as error:  # of unpickling, whatever a cut file holds
        return f"can't be read ({error!r})"
    return f"lacks {len(missing)} of its {len(files)} data files" if missing else ""


def _step_of(checkpoint: str) -> int:
    """The step that a checkpoint was saved at, read without the rest of it; -1 if it doesn't say."""
    state = {TRAIN_STATE: {"step": -1}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that one process reads by itself
        try:
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is none of the former
            # Whatever is wrong with it, the load of the whole says it better.
            logger.warning(f"{checkpoint} does not say its step: {error!r}")
    return int(state[TRAIN_STATE]["step"])
