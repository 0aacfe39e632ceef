"""What a plan takes beside the card: the data set and its encoding, the host, time and money."""
