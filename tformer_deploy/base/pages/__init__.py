"""HTML pages: layout, tables, plots as SVG. `check` and `bench` fill them."""
