"""`AmpReport`: one page at the end of a training that shows what mixed precision did."""

import base64
import html
import io
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from typing_extensions import override

from lightning_amp.callbacks.trainers import active_plugin
from lightning_amp.outcomes import LossAccount, Outcome

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
td,th{padding:.25rem .9rem .25rem 0;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}
img{max-width:100%}pre{background:#f6f6f6;padding:.8rem;overflow:auto}"""


class AmpReport(Callback):
    """Writes one self-contained HTML page when training ends, or stops by an exception.

    It shows the level and its settings; each loss's scale over time with the skips marked; how many backward passes
    overflowed; how many gradient elements underflowed to zero, in a sample; the time a batch took; and which modules
    hold weights of which dtype. Needs matplotlib (``pip install 'lightning-amp[examples]'``).

    Args:
        file: Where the page goes.
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
        self._batches = 0
        self._scales: dict[str, list[tuple[int, float]]] = {}
        self._overflows: dict[str, list[tuple[int, float]]] = {}
        self._accounts: dict[str, LossAccount] = {}
        self._zeros: dict[str, tuple[int, int]] = {}
        self._times: list[float] = []
        self._began = 0.0
        self._dtypes: list[tuple[str, str, str]] = []

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        for name, module in pl_module.named_modules():
            kinds = Counter(str(p.dtype).removeprefix("torch.") for p in module.parameters(recurse=False))
            if kinds:
                self._dtypes.append((name, type(module).__name__, ", ".join(kinds)))

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    @override
    def on_before_optimizer_step(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Any) -> None:
        if self._batches % (20 * self.every_n_batches):
            return
        index = next(i for i, mine in enumerate(trainer.optimizers) if mine is optimizer)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        zeros, count = self._zeros.get(f"optimizer {index}", (0, 0))
        zeros += sum(int((g.to_dense() == 0).sum()) for g in grads)
        self._zeros[f"optimizer {index}"] = (zeros, count + sum(g.numel() for g in grads))

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *_: Any) -> None:
        self._times.append(time.perf_counter() - self._began)
        self._batches += 1
        plugin = active_plugin(trainer)
        if plugin is None or self._batches % self.every_n_batches:
            return
        accounts, _norms = plugin.read_accounts([])
        for name, account in accounts.items():
            before = self._accounts.get(name)
            self._scales.setdefault(name, []).append((self._batches, account.scale))
            if account.overflows > (before.overflows if before else 0):
                self._overflows.setdefault(name, []).append((self._batches, account.scale))
        self._accounts = accounts

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.write(trainer)

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        if self._batches:
            self.write(trainer)

    @rank_zero_only
    def write(self, trainer: "pl.Trainer") -> None:
        """Writes the page as things stand.

        Args:
            trainer: The trainer.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self._page(trainer), encoding="utf-8")
        rank_zero_info(f"AmpReport: open {self.file}")

    def _page(self, trainer: "pl.Trainer") -> str:
        plugin = active_plugin(trainer)
        level = plugin.config.describe() if plugin else f"{trainer.precision}: Lightning alone, nothing is scaled"
        parts = [f"<h1>Mixed precision report</h1><pre>{html.escape(level)}</pre>"]
        if plugin and self._scales:
            picture = base64.b64encode(self._plot()).decode()
            parts.append(f'<h2>Loss scales</h2><img alt="loss scales" src="data:image/png;base64,{picture}">')
            rows = [
                [
                    n,
                    a.attempts,
                    a.overflows,
                    f"{a.overflows / max(1, a.attempts):.2%}",
                    a.nonfinite_losses,
                    f"{a.scale:g}",
                ]
                for n, a in self._accounts.items()
            ]
            parts.append(_table(["loss", "backward passes", "overflows", "share", "loss non-finite", "scale"], rows))
        if plugin:
            counts = [(i, plugin.engine.counts(o)) for i, o in enumerate(trainer.optimizers)]
            rows = [[f"optimizer {i}", *(c[outcome] for outcome in Outcome)] for i, c in counts]
            parts.append("<h2>Steps</h2>" + _table(["", *(o.value for o in Outcome)], rows))
        rows = [[n, f"{zeros / max(1, count):.2%}"] for n, (zeros, count) in self._zeros.items()]
        parts.append("<h2>Gradient elements that are zero (a sample)</h2>" + _table(["", "share"], rows))
        times = sorted(self._times)
        middle, slow = times[len(times) // 2] * 1e3, times[int(len(times) * 0.95)] * 1e3
        parts.append(
            f"<h2>Time</h2><p>{len(times)} batches; half of them took less than {middle:.1f} ms, 95 % less than "
            f"{slow:.1f} ms.</p>"
        )
        parts.append("<h2>Weights</h2>" + _table(["module", "class", "dtype"], [list(row) for row in self._dtypes]))
        title = "<!doctype html><meta charset='utf-8'><title>Mixed precision report</title>"
        return f"{title}<style>{_STYLE}</style>{''.join(parts)}\n"

    def _plot(self) -> bytes:
        from matplotlib.figure import Figure  # no pyplot: it would keep the figure, and choose a backend

        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, points in self._scales.items():
            (line,) = axes.step(*zip(*points, strict=True), where="post", label=name, linewidth=1.6)
            skips = self._overflows.get(name)
            if skips:
                axes.plot(
                    *zip(*skips, strict=True), "x", color=line.get_color(), markersize=7, label=f"{name} overflowed"
                )
        axes.set_yscale("log", base=2)
        axes.set_xlabel("batch")
        axes.set_ylabel("loss scale")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, ncols=2)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
        return buffer.getvalue()


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
