"""`AmpReport`: one page at the end of a training that shows what mixed precision did."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch.optim import Optimizer
from typing_extensions import override

from lightning_amp.callbacks.report_page import page
from lightning_amp.callbacks.report_record import Record, optimizer_names, watch_dtypes, zero_share
from lightning_amp.callbacks.trainers import active_plugin, batches_begun, require, under_root
from lightning_amp.precision import AmpPrecision

_ZEROS_EVERY = 20


class AmpReport(Callback):
    """Writes one self-contained HTML page when training ends, or stops by an exception.

    It shows the level and its settings; each loss's scale over time with the skips marked; how many backward passes
    overflowed; how many gradient elements were zero, in a sample; the time a batch took; and which modules ran in which
    dtype in the first batch. Needs matplotlib (``pip install 'lightning-amp[examples]'``).

    Args:
        file: Where the page goes, from the trainer's ``default_root_dir``.
        every_n_batches: How often the scales are looked at: one host synchronisation each time.

    Raises:
        ValueError: ``every_n_batches`` is below one.

    Example:
        >>> AmpReport("out/amp_report.html").file
        PosixPath('out/amp_report.html')
    """

    def __init__(self, file: str = "amp_report.html", every_n_batches: int = 1) -> None:
        if every_n_batches < 1:
            raise ValueError(f"every_n_batches={every_n_batches!r} cannot be used. Use at least 1.")
        self.file, self.every_n_batches = Path(file), every_n_batches
        self._record = Record()
        self._names: list[str] = []
        self._began = 0.0
        self._handles: list[Any] = []

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        require("matplotlib", self)

    @override
    @rank_zero_only
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._record = Record()
        self._names = optimizer_names(pl_module, trainer.optimizers)
        self._handles = watch_dtypes(pl_module, self._record.modules)

    @override
    @rank_zero_only
    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    @override
    @rank_zero_only
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        batch = batches_begun(trainer)
        if (batch - 1) % (_ZEROS_EVERY * self.every_n_batches):
            return
        share = zero_share(optimizer)
        if share is not None:
            index = next(i for i, mine in enumerate(trainer.optimizers) if mine is optimizer)
            self._record.zeros.setdefault(self._names[index], []).append((batch, share))

    @override
    @rank_zero_only
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        self._unhook()
        self._record.batches = batches_begun(trainer)
        plugin = active_plugin(trainer)
        if plugin is not None and self._record.batches % self.every_n_batches == 0:
            self._record.take(plugin.read_accounts([])[0])
        self._record.seconds.append(time.perf_counter() - self._began)  # after the read, which waited for the device

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.write(trainer)

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._unhook()
        if self._record.seconds:
            self.write(trainer)

    def path(self, trainer: "pl.Trainer") -> Path:
        """Returns where the page goes.

        Args:
            trainer: The trainer.
        """
        return under_root(trainer, self.file)

    @rank_zero_only
    def write(self, trainer: "pl.Trainer") -> None:
        """Writes the page as things stand.

        Args:
            trainer: The trainer.
        """
        plugin = active_plugin(trainer)
        if plugin is not None:
            counts = [plugin.engine.counts(optimizer) for optimizer in trainer.optimizers]
            self._record.take(plugin.read_accounts([])[0])
            self._record.steps = dict(zip(self._names, counts, strict=True))
        file = self.path(trainer)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(self._record, *_level(trainer)), encoding="utf-8")
        rank_zero_info(f"AmpReport: open {file}")

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _level(trainer: "pl.Trainer") -> tuple[str, str]:
    """Returns what the training ran in, in a word and in full."""
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AmpPrecision):
        return str(trainer.precision), f"{trainer.precision}: Lightning's own precision; no loss scales to show"
    config = plugin.config
    half = str(config.dtype).removeprefix("torch.")
    return config.opt_level if config.passive else f"{config.opt_level} {half}", config.describe()
