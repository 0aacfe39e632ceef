"""The real step on the machine at hand, beside the emulated one and a plain loop; memory against the micro-batch.
"""
