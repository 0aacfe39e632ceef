"""Points of a plan beside what it recommends, as its pages show them: they ran, were rehearsed, or are predicted."""
