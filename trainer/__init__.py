"""Training: shards, the production step, checkpoints that resume to the token, and the command line over them."""
