"""A DCGAN with three losses and two optimizers, trained in mixed precision: from flags, or from YAML."""
