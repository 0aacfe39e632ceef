"""Plans: what fits a card, how fast it goes, and what to set."""
