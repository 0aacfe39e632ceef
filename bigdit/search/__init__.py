"""Plans: what fits a card, how fast it goes, and what to set.

The question and its checks, proposals, confirmation by rehearsals; `predict` is what siblings say of the whole model,
`needs` what is taken beside the card. Seconds come from `speed`, bytes from `rehearse` and `memory`.
"""
