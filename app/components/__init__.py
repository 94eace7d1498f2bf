"""Charts, tables and panels that pages share."""
