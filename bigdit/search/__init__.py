"""Plans: what fits a card, how fast it goes, and what to set.

A question is asked (`asking`), what answers it is found (`finding`), what it means is told (`telling`); `predict` is
what siblings say of the whole model, `needs` what is taken beside the card. Seconds are `speed`'s.
"""
