"""How fast a GPU does what a step asks of it: kernels, launches, copies, collectives, as intervals.

What a step does is counted in an attempt. Which strategies are timed, and what is made of it, is `search`.
"""
