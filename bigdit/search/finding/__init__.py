"""What is found by rehearsals and on emulated cards: proposals, candidates in order, the best that runs, its limits.

What siblings say of the whole model is `search/predict`; how a candidate is shown beside others is `search/telling`.
"""
