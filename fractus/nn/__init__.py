"""Layers of the body: thin modules over the operators, under the names that existing scripts import."""
