"""A WGAN with gradient penalty: a loss that holds a gradient, under mixed precision."""
