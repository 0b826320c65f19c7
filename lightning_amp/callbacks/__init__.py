"""Callbacks for the Trainer, one a file; each can be named in YAML."""

from lightning_amp.callbacks.ema_weights import EMAWeights

__all__ = ["EMAWeights"]
