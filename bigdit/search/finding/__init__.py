"""What is found on emulated GPUs: proposals, candidates in order, the best that runs, its limits.

What siblings say of the whole model is `search/predict`; how a candidate is shown beside others is `search/telling`.
"""
