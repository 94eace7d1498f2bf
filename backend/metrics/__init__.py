"""Records, formulas, ledgers and live views; no torch."""
