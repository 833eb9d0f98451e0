"""The areas of figures, a module each; `PARTS` has the parts of an area by name."""
