"""Records into markdown tables and plots, and the merge gate; nothing here imports torch."""
