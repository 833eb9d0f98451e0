"""One module an area of figures."""
