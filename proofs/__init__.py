"""Properties, the isolated prover and the adversaries it is tested against."""
