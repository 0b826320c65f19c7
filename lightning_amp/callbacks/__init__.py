"""Callbacks for the Trainer, one a file; each can be named in YAML."""

from lightning_amp.callbacks.amp_report import AmpReport
from lightning_amp.callbacks.ema_weights import EMAWeights
from lightning_amp.callbacks.gradient_clipping import GradientClipping
from lightning_amp.callbacks.image_grid import ImageGrid
from lightning_amp.callbacks.loss_scale_monitor import LossScaleMonitor
from lightning_amp.callbacks.non_finite_report import NonFiniteReport

__all__ = ["AmpReport", "EMAWeights", "GradientClipping", "ImageGrid", "LossScaleMonitor", "NonFiniteReport"]
